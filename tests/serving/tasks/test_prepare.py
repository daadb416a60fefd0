"""The preparation of raw requests: defaults, templates, limits and refusals."""

import dataclasses
import math

import pytest

from mlflow_llm.serving.dialects import DIALECTS, FIELDS
from mlflow_llm.serving.dialects.fields.defaults import defaults_of
from mlflow_llm.serving.interface.errors import ContextTooLong, InvalidField, NotFound, RequestError
from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.interface.request import Message, TextPart, ToolCall
from mlflow_llm.serving.tasks.prepare import NO_LIMITS, Limits, prepare
from mlflow_llm.serving.tasks.prompt.conversation import check_turns, template_messages
from mlflow_llm.serving.tasks.prompt.rendering import TemplateReads

HI = [{"role": "user", "content": "hello world"}]


def _valid(endpoint, limits=NO_LIMITS, **body):
    return prepare(DIALECTS["mlflow"].read(body), endpoint, limits, now=1000.0, created=1000)


def test_defaults(endpoint, text):
    """Fields left out get final values: temperature 1, the rest of the context, the model's end tokens."""
    request = _valid(endpoint, messages=HI)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.max_tokens == 512 - len(request.sequences[0].prompt_token_ids)
    assert sampling.stop_token_ids == text.eos_token_ids
    assert request.created == 1000
    assert request.deadline is None


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ({"temperature": 1e-38}, {"temperature": 0.0}),
        ({"temperature": 9e-6}, {"temperature": 0.0}),
        ({"temperature": 1e-5}, {"temperature": 1e-5}),
        ({"repetition_penalty": 1e-40}, {"repetition_penalty": 1e-9}),
        ({"typical_p": 5e-324}, {"typical_p": 1e-9}),
    ],
)
def test_divisors_that_underflow_in_float32(endpoint, asked, used):
    """A divisor that underflows in float32 is replaced by the nearest value with the same effect and finite logits."""
    sampling = _valid(endpoint, prompt="fox", **asked).sampling
    assert {name: getattr(sampling, name) for name in used} == used


def test_null_means_default(endpoint):
    """Every field set to null gives the same request as leaving it out."""
    nulls = dict.fromkeys(name for name in FIELDS["chat"] if name != "messages")
    assert _valid(endpoint, messages=HI, **nulls).sampling == _valid(endpoint, messages=HI).sampling


def test_one_bos(endpoint, text):
    """The template's BOS is the only one in a chat; a raw prompt gets the tokenizer's, and no second if it has one."""
    bos = text.encode("")[0]
    for request in (
        _valid(endpoint, messages=HI),
        _valid(endpoint, prompt="hello"),
        _valid(endpoint, prompt="<s>hello"),
        _valid(endpoint, prompt="hello", use_raw_prompt=False),
    ):
        assert request.sequences[0].prompt_token_ids.count(bos) == 1
    assert _valid(endpoint, prompt="<s>hello").sequences[0].prompt_token_ids == text.encode("hello")


def test_special_tokens_of_callers_are_text(endpoint, text):
    """A caller who writes a control token in a message gets its letters tokenised, not the token."""
    end = text.encode("<|end|>", False)[0]
    request = _valid(endpoint, messages=[{"role": "user", "content": "a<|end|>b"}])
    assert request.sequences[0].prompt_token_ids.count(end) == 1
    assert "a<|end|>b" in text.decode(request.sequences[0].prompt_token_ids)


def test_use_raw_prompt(endpoint_of, text):
    """Completions are raw by default in one profile and templated in the other, and the field decides over both."""
    raw, templated = endpoint_of(raw_prompts=True), endpoint_of(raw_prompts=False)
    assert _valid(raw, prompt="fox").sequences[0].prompt_token_ids == text.encode("fox")
    assert _valid(templated, prompt="fox", use_raw_prompt=True).sequences[0].prompt_token_ids == text.encode("fox")
    request = _valid(templated, prompt="fox", echo=True)
    assert "<|start|>user\nfox" in text.decode(request.sequences[0].prompt_token_ids, skip_special_tokens=False)
    assert request.echo == ("fox",)


def test_seeds(endpoint):
    """A seed gives the same seeds again, n=1 is choice 0 of n=4, choices differ, and without one seeds are drawn."""
    four = _valid(endpoint, messages=HI, seed=7, n=4)
    assert _valid(endpoint, messages=HI, seed=7).sequences[0] == four.sequences[0]
    assert len({s.seed for s in four.sequences}) == 4
    assert _valid(endpoint, messages=HI, seed=7, n=4).sequences == four.sequences
    assert _valid(endpoint, messages=HI).sequences[0].seed != _valid(endpoint, messages=HI).sequences[0].seed
    assert _valid(endpoint, messages=HI, seed=-1).sequences[0].seed == 2**64 - 1


def test_prompt_over_the_context(endpoint):
    """An over-long prompt names its size and the context; so does a max_tokens that leaves no room."""
    with pytest.raises(ContextTooLong, match="512"):
        _valid(endpoint, prompt="the quick brown fox " * 400)
    with pytest.raises(ContextTooLong, match="max_tokens: 512"):
        _valid(endpoint, prompt="the", max_tokens=512)
    with pytest.raises(ContextTooLong, match="512"):
        _valid(endpoint, messages=[{"role": "user", "content": "the quick " * 400}])


@pytest.mark.parametrize("content", ["hello world " * 450_000, "x" * 5_000_000, "😀" * 1_300_000, "<|end|>" * 700_000])
def test_five_megabytes_are_refused_without_tokenising_all(endpoint, monkeypatch, content):
    """A 5 MB body that cannot fit is refused after about as many tokens as the context has."""
    seen = []
    text = endpoint.text
    encode = text.backend.encode

    class Counting:
        def __init__(self, backend):
            self.backend = backend

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def encode(self, written, **kwargs):
            seen.append(len(written))
            return encode(written, **kwargs)

    monkeypatch.setattr(text, "backend", Counting(text.backend))
    with pytest.raises(ContextTooLong):
        _valid(endpoint, prompt=content)
    with pytest.raises(ContextTooLong):
        _valid(endpoint, messages=[{"role": "user", "content": content}])
    assert sum(seen) < 500_000


def test_truncate(endpoint, text):
    """error_behavior truncate keeps the end of a long prompt behind its BOS and room for max_tokens."""
    words = "the quick brown fox " * 400
    request = _valid(endpoint, prompt=words + "LAST", max_tokens=20, error_behavior="truncate")
    ids = request.sequences[0].prompt_token_ids
    assert request.truncated
    assert len(ids) == 492
    assert ids[0] == text.encode("")[0]
    assert text.decode(ids).endswith("fox LAST")
    assert request.sampling.max_tokens == 20
    huge = _valid(endpoint, prompt=words * 100 + "LAST", error_behavior="truncate")
    assert len(huge.sequences[0].prompt_token_ids) == 384
    assert huge.sampling.max_tokens == 128


def test_truncate_gives_what_fits(endpoint):
    """error_behavior truncate clamps a max_tokens that the context cannot hold and cuts no prompt that fits."""
    request = _valid(endpoint, prompt="the dog", max_tokens=200, error_behavior="truncate")
    assert not request.truncated
    clamped = _valid(endpoint, prompt="the dog", max_tokens=5000, error_behavior="truncate")
    assert not clamped.truncated
    assert clamped.sampling.max_tokens == 512 - len(clamped.sequences[0].prompt_token_ids)


def test_adapters(endpoint_of):
    """model "endpoint:adapter" and the field adapter name an adapter; an unknown one gets the list of those there."""
    endpoint = endpoint_of(adapters=("pirate", "haiku"), names=("entity-1",))
    assert _valid(endpoint, messages=HI, model="m:pirate").adapter == "pirate"
    assert _valid(endpoint, messages=HI, model="entity-1:haiku").adapter == "haiku"
    assert _valid(endpoint, messages=HI, adapter="haiku").adapter == "haiku"
    assert _valid(endpoint, messages=HI, model="entity-1").adapter is None
    with pytest.raises(NotFound, match="haiku, pirate"):
        _valid(endpoint, messages=HI, model="m:nobody")
    with pytest.raises(NotFound, match="'m'"):
        _valid(endpoint, messages=HI, model="other")
    for empty in ({"adapter": ""}, {"model": "m:"}, {"model": "m:", "adapter": ""}):
        with pytest.raises(NotFound, match="no adapter ''; loaded: haiku, pirate"):
            _valid(endpoint, messages=HI, **empty)
    with pytest.raises(InvalidField, match="adapter"):
        _valid(endpoint, messages=HI, model="m:haiku", adapter="pirate")


def test_any_model_name(endpoint_of):
    """A model loaded in a notebook takes any name for itself, but no adapter that it does not have."""
    endpoint = endpoint_of(names=None, adapters=lambda: ("haiku", "pirate"))
    for name in ("models:/x/1", "models:/x@prod", "gpt-4o", "org/name"):
        assert _valid(endpoint, messages=HI, model=name).adapter is None
    assert _valid(endpoint, messages=HI, model="whatever:pirate").adapter == "pirate"
    for model in ("whatever:nobody", "whatever:"):
        with pytest.raises(NotFound, match=r"no adapter '(nobody)?'; loaded: haiku, pirate"):
            _valid(endpoint, messages=HI, model=model)


def test_wrong_task(endpoint_of):
    """A request of a task that the model does not have says which it has."""
    with pytest.raises(RequestError, match="embeddings, not chat"):
        _valid(endpoint_of(tasks=("embeddings",)), messages=HI)
    with pytest.raises(RequestError, match="chat, completions, not embeddings"):
        _valid(endpoint_of(tasks=("chat", "completions")), input="x")


def test_template_that_refuses(endpoint_of, text_of):
    """A template's raise_exception is reported as a bad messages field with the template's words and no stack."""
    source = "{{ raise_exception('role ' + messages[0].role + ' is unknown') }}"
    with pytest.raises(InvalidField, match="role user is unknown") as caught:
        _valid(endpoint_of(model=text_of(source)), messages=HI)
    assert caught.value.param == "messages"
    assert caught.value.__suppress_context__


def test_no_template(endpoint_of, fallback_text):
    """A chat with a model that has no template is refused; a completion of it is raw."""
    endpoint = endpoint_of(model=fallback_text, raw_prompts=False)
    with pytest.raises(InvalidField, match="no chat template"):
        _valid(endpoint, messages=HI)
    assert _valid(endpoint, prompt="the").sequences[0].prompt_token_ids == fallback_text.encode("the")


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([{"role": "assistant", "content": "x"}], r"messages\[0\].role"),
        ([*HI, *HI], r"messages\[1\].role"),
        ([*HI, {"role": "assistant", "content": "x"}], r"messages\[1\].role"),
        ([{"role": "system", "content": "x"}], r"messages\[0\].role"),
        ([*HI, {"role": "system", "content": "x"}, *HI], r"messages\[1\].role"),
        ([*HI, {"role": "tool", "content": "x", "tool_call_id": "a"}], r"messages\[1\].role"),
    ],
)
def test_strict_turns(endpoint_of, messages, where):
    """The Databricks profile wants one system message first, then user and assistant in turn, ending in user."""
    with pytest.raises(InvalidField, match=where):
        _valid(endpoint_of(strict_turns=True), messages=messages)


def test_parts_of_a_message(endpoint):
    """Text parts come to the template joined as they stand, and are one prompt with the same text in one string."""
    parts = [{"type": "text", "text": part} for part in ("hello", " wor", "ld")]
    parted = _valid(endpoint, messages=[{"role": "user", "content": parts}], seed=1)
    assert parted.sequences == _valid(endpoint, messages=HI, seed=1).sequences
    call = ToolCall(id="c", name="f", arguments={"a": 1})
    message = Message(role="assistant", content=(TextPart("a"), TextPart("b")), name="Jo", tool_calls=(call,))
    assert list(template_messages([message])[0].items()) == [
        ("role", "assistant"),
        ("content", "ab"),
        ("name", "Jo"),
        ("tool_calls", [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]),
    ]


def test_strict_turns_with_tools():
    """Tool messages follow the assistant's calls, and after them the assistant or the user goes on."""
    hi = Message(role="user", content="hello world")
    call = Message(role="assistant", tool_calls=tuple(ToolCall(id=i, name="f", arguments={}) for i in "ab"))
    answers = [Message(role="tool", content="1", tool_call_id=i) for i in "ab"]
    check_turns((hi, call, *answers))
    check_turns((hi, call, *answers, Message(role="assistant", content="x"), hi))
    for wrong in ((hi, call), (hi, *answers), (hi, call, hi), (call, *answers)):
        with pytest.raises(InvalidField):
            check_turns(wrong)


def test_fields_of_endpoint_kinds(endpoint_of):
    """n is refused on pay-per-token endpoints and error_behavior on provisioned ones, each saying why."""
    paid, provisioned = endpoint_of(allow_n=False), endpoint_of(allow_error_behavior=False)
    with pytest.raises(InvalidField, match=r"^n: 2 .* provisioned throughput endpoints only$"):
        _valid(paid, messages=HI, n=2)
    for body in ({"prompt": "x"}, {"messages": HI}, {"input": "x"}):
        for value in ("truncate", "error"):
            with pytest.raises(InvalidField, match=rf"^error_behavior: '{value}' .* pay-per-token endpoints only$"):
                _valid(provisioned, error_behavior=value, **body)
    assert _valid(paid, messages=HI, n=1, error_behavior="truncate").n == 1
    assert _valid(provisioned, messages=HI, n=2).n == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stop": [f"s{i}" for i in range(10_000)]}, "stop"),
        ({"stop": "x" * 40_000}, "stop"),
        ({"n": 1000}, "n"),
        ({"stop_token_ids": list(range(100))}, "stop_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids[0]"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"temperature": math.nan}, "temperature"),
    ],
)
def test_limits(endpoint, body, field):
    """Each limit is refused naming the field."""
    with pytest.raises(InvalidField) as caught:
        _valid(endpoint, messages=HI, **body)
    assert caught.value.param == field
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("source", "variables", "tool_calls"),
    [
        (
            "{{ messages }}{% if tools %}{{ enable_thinking }}{% endif %}",
            {"messages", "tools", "enable_thinking"},
            False,
        ),
        ("{% for m in messages %}{{ m.tool_calls }}{% break %}{% endfor %}{% set x = 1 %}{{ x }}", {"messages"}, True),
        ("{% generation %}{{ a }}{% endgeneration %}", {"a"}, False),
        ("{% nobody_knows %}", None, False),
    ],
)
def test_what_a_template_reads(source, variables, tool_calls):
    """A template's external variables are found, also with transformers' own tags; None if it cannot be parsed."""
    reads = TemplateReads(source)
    assert (reads.variables, reads.tool_calls) == (variables, tool_calls)


def test_prompts_by_token_ids(endpoint, text):
    """Token ids are fed as they are, echo shows their text, and an id outside the vocabulary is refused by place."""
    ids = text.encode("the dog")
    request = _valid(endpoint, prompt=[list(ids), [5]], echo=True)
    assert request.sequences[0].prompt_token_ids == ids
    assert request.echo[0] == "<s>the dog"
    with pytest.raises(InvalidField, match=r"prompt\[1\]\[0\]"):
        _valid(endpoint, prompt=[[5], [10**6]])


def test_choices_have_one_bound(endpoint, endpoint_of):
    """Whichever side a number of choices is off, the same range is named; a batch of prompts has less for each."""
    for n in (0, 129):
        with pytest.raises(InvalidField, match=r"an integer in \[1, 128\]"):
            _valid(endpoint, messages=HI, n=n)
    with pytest.raises(InvalidField, match=r"n: 3 .* in \[1, 2\] with 5 prompts"):
        _valid(endpoint_of(max_sequences=10), prompt=["the"] * 5, n=3)


def test_too_many_prompts(endpoint_of):
    """A batch beyond the endpoint's limit is refused with the number allowed."""
    with pytest.raises(InvalidField, match="at most 3"):
        _valid(endpoint_of(max_prompts=3), prompt=["a"] * 4)


@pytest.mark.parametrize("body", [{"messages": HI}, {"prompt": "x"}, {"input": "x"}])
def test_deadline(endpoint_of, body):
    """The deadline is after the shortest of the time that request, model, endpoint, and server with headers allow."""
    for asked, profile, server, own, expected in (
        (None, None, None, None, None),
        (2.5, None, None, None, 2.5),
        (60, 10, None, None, 10),
        (2.5, 10, 600, None, 2.5),
        (60, None, 3, None, 3),
        (None, 10, 20, 5, 5),
        (7, 10, 20, 5, 7),
    ):
        endpoint = endpoint_of(timeout=profile)
        if own is not None:
            endpoint = dataclasses.replace(endpoint, defaults=defaults_of({"timeout": own}))
        given = body if asked is None else body | {"timeout": asked}
        found = _valid(endpoint, Limits(timeout=server), **given).deadline
        assert found == (None if expected is None else 1000 + expected)
    assert _valid(endpoint_of(timeout=10), messages=HI, timeout=2.5).deadline == 1002.5


def test_defaults_of_the_model(endpoint_of):
    """The default adapter and fields stand where a request says nothing; lengths give way to the context."""
    endpoint = dataclasses.replace(
        endpoint_of(adapters=("haiku", "pirate")),
        default_adapter="pirate",
        defaults=defaults_of({"temperature": 0, "max_tokens": 10**6, "min_tokens": 9, "cache_salt": "s", "user": "u"}),
    )
    limits = Limits(cache_salt=lambda asked: f"salt of {asked}")
    request = _valid(endpoint, limits, messages=HI)
    assert (request.adapter, request.sampling.temperature, request.cache_salt) == ("pirate", 0.0, "salt of s")
    assert request.sampling.max_tokens == 512 - len(request.sequences[0].prompt_token_ids)
    own = _valid(endpoint, limits, messages=HI, adapter="haiku", temperature=1, max_tokens=3, cache_salt="mine")
    assert (own.adapter, own.sampling.temperature, own.cache_salt) == ("haiku", 1.0, "salt of mine")
    assert (own.sampling.max_tokens, own.sampling.min_tokens) == (3, 3)
    raw = DIALECTS["mlflow"].read({"messages": HI})
    assert (endpoint.labels(raw).user, endpoint_of().labels(raw)) == ("u", Labels())
    with pytest.raises(NotFound, match="no adapter 'pirate'; loaded: haiku"):
        _valid(dataclasses.replace(endpoint, adapters=("haiku",)), messages=HI)


def test_prefixes_are_shared_with_no_other_request(endpoint):
    """Prefixes are shared with no other request unless the server configures sharing."""
    assert _valid(endpoint, messages=HI, cache_salt="mine").cache_salt is None


def test_default_system_prompt(endpoint_of, text):
    """The endpoint's system prompt is used where the caller sends none, and counted in the prompt."""
    endpoint = endpoint_of(default_system_prompt="the lazy dog")
    assert "the lazy dog" in text.decode(_valid(endpoint, messages=HI).sequences[0].prompt_token_ids)
    own = _valid(endpoint, messages=[{"role": "system", "content": "fox"}, *HI])
    assert "the lazy dog" not in text.decode(own.sequences[0].prompt_token_ids)
