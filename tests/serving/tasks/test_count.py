"""Prompts that are only looked at have the tokens that a request's prompt has."""

import pytest

from mlflow_llm.serving.dialects.fields.decode import decode
from mlflow_llm.serving.dialects.fields.tables import MLFLOW
from mlflow_llm.serving.interface.bundle import EmbeddingSpec
from mlflow_llm.serving.interface.errors import ContextTooLong, InvalidField, RequestError
from mlflow_llm.serving.interface.request import RawChat, RawSampling
from mlflow_llm.serving.tasks import count
from mlflow_llm.serving.tasks.prepare import prepare

HI = [{"role": "user", "content": "hello <|end|> world"}]
GO_ON = [*HI, {"role": "assistant", "content": "once upon "}]
TOOL = {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {"type": "object"}}}
TEXTS = ("chat", "completions")


def _raw(**body):
    return decode(MLFLOW, body, None)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HI},
        {"messages": HI, "max_tokens": 400, "temperature": 0, "n": 2},
        {"messages": HI, "tools": [TOOL]},
        {"prompt": "hello world"},
        {"prompt": "<s>hello", "use_raw_prompt": True},
        {"prompt": "hello", "use_raw_prompt": False},
        {"prompt": [5, 6, 7]},
        {"input": "hello world"},
        {"input": "hello world", "instruction": "query"},
    ],
)
def test_as_the_engine_gets_it(endpoint, body):
    """A counted prompt has the tokens of the request that is run."""
    expected = prepare(_raw(**body), endpoint).sequences[0].prompt_token_ids
    assert count.prompt_tokens(_raw(**body), endpoint) == expected


def test_templated_completions(endpoint_of):
    """A counted completion goes through the template if completions of the endpoint do."""
    templated = endpoint_of(raw_prompts=False, default_system_prompt="hello")
    expected = prepare(_raw(prompt="world"), templated).sequences[0].prompt_token_ids
    assert count.prompt_tokens(_raw(prompt="world"), templated) == expected


@pytest.mark.parametrize("name", ["messages", "prompt", "input"])
def test_longer_than_the_context(endpoint_of, name):
    """A prompt that does not fit the model is counted whole."""
    endpoint = endpoint_of(context=32)
    text = "hello world " * 100
    body = {name: [{"role": "user", "content": text}] if name == "messages" else text}
    with pytest.raises(ContextTooLong):
        prepare(_raw(**body), endpoint)
    assert count.prompt_tokens(_raw(**body), endpoint) == count.prompt_tokens(_raw(**body), endpoint_of(context=9999))


def test_inputs_longer_than_the_encoders_own_limit(endpoint_of, text, monkeypatch):
    """An input above the length that the model was trained for is counted whole."""
    monkeypatch.setattr(text, "embedding", EmbeddingSpec(max_length=8))
    endpoint = endpoint_of(tasks=("embeddings",))
    whole = count.prompt_tokens(_raw(input="hello world " * 30), endpoint)
    assert len(whole) > 8
    assert text.decode(whole) == "hello world " * 30
    assert count.room(endpoint) == 8


@pytest.mark.parametrize("name", ["messages", "prompt", "input"])
def test_more_than_is_counted(endpoint, name, monkeypatch):
    """Above a bound a prompt is refused by its field, without all of it being encoded."""
    monkeypatch.setattr(count, "MAX_COUNTED_TOKENS", 20_000)
    text = "hello world ###" * 200_000
    body = {name: [{"role": "user", "content": text}] if name == "messages" else text}
    with pytest.raises(ContextTooLong, match="more than 20000 tokens, which are the most that are counted") as refused:
        count.prompt_tokens(_raw(**body), endpoint)
    assert refused.value.param == name


def test_counting_refuses_what_prepare_refuses(endpoint_of):
    """A task that the model does not do and a template it does not have are refused as in a request."""
    with pytest.raises(RequestError, match="this model does embeddings"):
        count.prompt_tokens(_raw(prompt="x"), endpoint_of(tasks=("embeddings",)))
    with pytest.raises(InvalidField, match="chat_template"):
        count.prompt_tokens(_raw(messages=HI, chat_template="other"), endpoint_of())


def test_texts_by_themselves(endpoint_of, text):
    """Special tokens around a plain text are added on request and never twice."""
    endpoint = endpoint_of(tasks=TEXTS, raw_prompts=False)
    bos = text.encode("")
    assert count.text_tokens("hello", endpoint, True) == bos + count.text_tokens("hello", endpoint, False)
    assert count.text_tokens("<s>hello", endpoint, True) == count.text_tokens("hello", endpoint, True)
    assert count.text_tokens("", endpoint, False) == ()


@pytest.mark.parametrize("last", ["once upon", "once upon ", " once <|end|> upon", ""])
def test_the_last_message_left_open(endpoint, text, last):
    """An open prompt ends in the last message's text; a closed one after it; neither begins a reply."""
    messages = _raw(messages=[*HI, {"role": "assistant", "content": last}]).messages
    open_, closed, replying = (
        text.decode(count.prompt_tokens(RawChat(messages=messages, end=end), endpoint), skip_special_tokens=False)
        for end in ("open", "closed", "generation_prompt")
    )
    assert open_.endswith("<|start|>assistant\n" + last)
    assert closed == open_ + "<|end|>\n"
    assert replying == closed + "<|start|>assistant\n"


def test_only_an_assistant_message_can_be_continued(endpoint):
    """A message of the user cannot be left open for the model."""
    with pytest.raises(InvalidField, match=r"messages\[0\].role"):
        count.prompt_tokens(RawChat(messages=_raw(messages=HI).messages, end="open"), endpoint)


def test_strict_turns_and_open_ends(endpoint_of):
    """With strict turns a chat may end in an assistant message only if no reply is begun."""
    strict, messages = endpoint_of(strict_turns=True), _raw(messages=GO_ON).messages
    for end in ("open", "closed"):
        assert count.prompt_tokens(RawChat(messages=messages, end=end), strict)
    with pytest.raises(InvalidField, match="the last message is the user's"):
        count.prompt_tokens(RawChat(messages=messages), strict)
    with pytest.raises(InvalidField):
        count.prompt_tokens(RawChat(messages=messages[1:], end="open"), strict)


def test_an_open_prompt_is_generated_from(endpoint):
    """A chat left open is prepared for the engine the same way."""
    messages = _raw(messages=GO_ON).messages
    raw = RawChat(messages=messages, end="open", sampling=RawSampling(max_tokens=4))
    assert prepare(raw, endpoint).sequences[0].prompt_token_ids == count.prompt_tokens(raw, endpoint)
