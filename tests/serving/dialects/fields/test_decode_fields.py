"""Request fields: honoured, or refused by name with the value and what is allowed."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.dialects import DIALECTS, FIELDS, REFUSED_FIELDS
from mlflow_llm.serving.dialects.fields.tables import DATABRICKS, MLFLOW, OPENAI
from mlflow_llm.serving.dialects.openai.codec import ObjectDialect
from mlflow_llm.serving.interface.errors import InvalidField, ServingError
from mlflow_llm.serving.interface.request import (
    Draft,
    Message,
    RawChat,
    RawCompletion,
    RawEmbedding,
    TextPart,
    ToolCall,
)

HI = [{"role": "user", "content": "hi"}]
ALL = sorted(
    name for name, dialect in DIALECTS.items() if isinstance(dialect, ObjectDialect) and len(dialect.tables) > 1
)


def _refused(body, dialect="mlflow", task=None):
    with pytest.raises(InvalidField) as caught:
        DIALECTS[dialect].read(body, task)
    assert len(caught.value.message) < 500
    return caught.value


@pytest.mark.parametrize("dialect", [name for name in ALL if name != "openvino"])  # here n depends on best_of
def test_every_sampling_field_arrives(dialect):
    """Each sampling field reaches the raw request under its name with its value."""
    fields = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "seed": 2**63,
        "n": 2,
        "min_tokens": 1,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": True,
        "top_logprobs": 20,
        "timeout": 3.0,
    }
    raw = DIALECTS[dialect].read({"messages": HI, "stop": ["a", "b"], "logit_bias": {"5": -100}, **fields})
    assert isinstance(raw, RawChat)
    for name, value in fields.items():
        assert getattr(raw.sampling, name) == value
    assert raw.sampling.stop == ("a", "b")
    assert raw.sampling.logit_bias == {5: -100.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 2.1),
        ("temperature", 10**400),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("max_tokens", "5"),
        ("n", 0),
        ("n", [1]),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", None]),
        ("stop", {"a": 1}),
        ("stop", ["\ud800"]),
        ("stream", "true"),
        ("stream", 1),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": 1, "01": 1}),
        ("logit_bias", [1]),
        ("model", 5),
        ("model", ["m"]),
        ("user", {"a": 1}),
        ("stop_token_ids", "1"),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [-1]),
        ("stream_options", True),
        ("stream_options", {"include_usage": True}),
        ("stream_options", {"continuous_usage_stats": True}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "text"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "always"),
        ("tool_choice", {"type": "function"}),
        ("functions", [{}]),
        ("functions", 0),
        ("tools", 0),
        ("tools", False),
        ("tools", ""),
        ("guided_json", False),
        ("watermark", 0),
        ("use_beam_search", 1),
        ("length_penalty", 1.0),  # without a beam search
        ("early_stopping", True),
        ("num_beam_groups", 2),
        ("diversity_penalty", 0.5),
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("reasoning_effort", "very"),
        ("add_generation_prompt", "x"),
        ("continue_final_message", 1),
        ("store", True),
        ("error_behavior", "ignore"),
        ("timeout", 0),
        ("timeout", -1),
    ],
)
def test_bad_values_name_their_field(field, value):
    """A value of a wrong type or range is refused, naming the field."""
    error = _refused({"messages": HI, field: value})
    assert error.param.startswith(field)
    assert field in error.message


@pytest.mark.parametrize("field", ["seed", "max_tokens", "top_k", "n", "temperature", "top_p", "min_p"])
def test_both_bounds_are_named(field):
    """The error for a value below or above the bounds names both of them."""
    schema = MLFLOW["chat"].fields[field].read.schema
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    above, below = (_refused({"messages": HI, field: value}) for value in (schema["maximum"] + 1, low - 1))
    for error in (above, below):
        assert error.message.endswith(f"{low}, {schema['maximum']}]"), error.message


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(
    ("body", "task"),
    [({"messages": HI}, "chat"), ({"prompt": "x"}, "completions"), ({"input": "x"}, "embeddings")],
)
def test_unknown_fields_are_refused_by_name(dialect, body, task):
    """An unknown field is refused, with the nearest name."""
    error = _refused({**body, "modle": "x"}, dialect, task)
    assert "modle" in error.message
    assert "did you mean 'model'" in error.message


def test_values_that_ask_for_nothing():
    """Fields that are unsupported, or meaningless here, are accepted with values that ask for nothing."""
    asked = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "databricks_options": {"return_trace": False},
        "modalities": ["text"],
        "audio": {},
        "watermark": False,
        "use_beam_search": False,
        "stop": [],
        "top_k": -1,
    }
    assert DIALECTS["mlflow"].read({"messages": HI, **asked}).sampling.top_k == 0
    DIALECTS["mlflow"].read({"messages": HI, "tools": [], "functions": None, "tool_choice": "auto"})


def test_databricks_keeps_to_its_document():
    """The document's top_k is null or above zero, and its own fields are unknown to OpenAI's dialect."""
    assert _refused({"messages": HI, "top_k": -1}, "databricks").param == "top_k"
    assert DIALECTS["databricks"].read({"prompt": "x", "use_raw_prompt": True}).use_raw_prompt is True
    assert _refused({"prompt": "x", "use_raw_prompt": True}, "openai").param == "use_raw_prompt"
    assert DIALECTS["databricks"].read({"input": "x", "instruction": "find"}).instruction == "find"


def test_max_completion_tokens():
    """max_completion_tokens means max_tokens, and both with different values are refused."""
    decode = DIALECTS["openai"].read
    assert decode({"messages": HI, "max_completion_tokens": 3}).sampling.max_tokens == 3
    assert decode({"messages": HI, "max_completion_tokens": 3, "max_tokens": 3}).sampling.max_tokens == 3
    assert _refused({"messages": HI, "max_completion_tokens": 3, "max_tokens": 4}).param == "max_completion_tokens"


def test_task_follows_from_the_body():
    """The task follows from messages, prompt or input; a body with none or two of them is refused."""
    decode = DIALECTS["databricks"].read
    assert isinstance(decode({"messages": HI}), RawChat)
    assert isinstance(decode({"prompt": "x"}), RawCompletion)
    assert isinstance(decode({"input": "x"}), RawEmbedding)
    for body in ({}, {"prompt": "x", "messages": HI}, [], "x", None, 5):
        _refused(body)
    assert _refused({}, task="chat").param == "messages"
    assert _refused({"messages": None}, task="chat").param == "messages"


@pytest.mark.parametrize(
    ("prompt", "prompts", "batched"),
    [
        ("a", ("a",), False),
        (["a", "b"], ("a", "b"), True),
        ([1, 2], ((1, 2),), False),
        ([[1], [2, 3]], ((1,), (2, 3)), True),
        ([1.0, 2], ((1, 2),), False),  # clients that have only floats
    ],
)
def test_prompt_forms(prompt, prompts, batched):
    """A prompt is a text, texts, token ids or lists of them."""
    raw = DIALECTS["openai"].read({"prompt": prompt})
    assert (raw.prompts, raw.batched) == (prompts, batched)


@pytest.mark.parametrize(
    "bad", [[], 5, {}, [1, "a"], ["a", 1], [[]], [True], [-1], [1.5], [1, 2**31], [[1], "a"], [None], "\udc00"]
)
def test_bad_prompts(bad):
    """Mixed, empty and wrongly typed prompts and inputs are refused with their path."""
    assert _refused({"prompt": bad}).param.startswith("prompt")
    assert _refused({"input": bad}).param.startswith("input")


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([*HI, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0].image_url"),
        ([{"role": "system", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_call_id": "a"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "\ud83d"}], "messages[0].content"),
    ],
)
def test_bad_messages(messages, where):
    """A message at fault is named by its place and key."""
    assert _refused({"messages": messages}).param == where


def test_messages_are_read_as_they_were_parted():
    """Text parts stay apart, developer is system, a reply's empty keys are dropped, arguments become an object."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    raw = DIALECTS["openai"].read(
        {
            "messages": [
                {"role": "developer", "content": "be kind"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "Jo",
                },
                {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
                {"role": "tool", "content": "1", "tool_call_id": "c1"},
            ]
        }
    )
    assert raw.messages == (
        Message(role="system", content="be kind"),
        Message(role="user", content=(TextPart("a"), TextPart("b")), name="Jo"),
        Message(role="assistant", tool_calls=(ToolCall(id="c1", name="f", arguments={"a": 1}),)),
        Message(role="tool", content="1", tool_call_id="c1"),
    )


def test_a_part_of_another_kind_is_refused_by_its_place():
    """A content part of an unsupported kind, such as audio, is refused by its path."""
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    content = [{"type": "text", "text": "what is this"}, sound]
    with pytest.raises(InvalidField, match=r'expected one of "text", "image_url"$') as caught:
        DIALECTS["openai"].read({"messages": [{"role": "user", "content": content}]})
    assert caught.value.param == "messages[0].content[1].type"


def test_field_names_are_complete():
    """The names given to the signature are those of all dialects' tables."""
    for task, names in FIELDS.items():
        ours = set() if task == "score" else set(OPENAI[task].fields)  # the other names of its texts are vLLM's alone
        assert set(names) == ours | set(DATABRICKS[task].fields) == set(MLFLOW[task].fields)
        assert len(set(names)) == len(names)
    assert not set(REFUSED_FIELDS) & set(FIELDS["chat"])
    assert all(field.note for table in MLFLOW.values() for field in table.fields.values() if field.target is None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    dialect=st.sampled_from(ALL),
    task=st.sampled_from([*FIELDS, None]),
    body=st.dictionaries(
        st.sampled_from([*FIELDS["chat"], *FIELDS["completions"], *FIELDS["score"], "input", "tools"]), JSON
    )
    | JSON,
)
def test_junk_never_gives_anything_but_a_serving_error(dialect, task, body):
    """Any JSON decodes or raises a ServingError with a short message."""
    try:
        DIALECTS[dialect].read(body, task)
    except ServingError as error:
        message = error.message
    else:
        message = ""
    assert len(message) < 600


@settings(max_examples=300, deadline=None, database=None)
@given(
    message=st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id"]),
        JSON | st.sampled_from(["user", "assistant", "tool"]),
    ),
    function=JSON,
)
def test_junk_messages(message, function):
    """Any junk in a message, and in a tool call, decodes or raises InvalidField."""
    for junk in (message, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}):
        try:
            DIALECTS["openai"].read({"messages": [junk]})
        except InvalidField as error:
            where = error.param
        else:
            where = "messages"
        assert where.startswith("messages")


@pytest.mark.parametrize("content", ["a text", [{"type": "text", "text": "a "}, {"type": "text", "text": "text"}]])
@pytest.mark.parametrize("dialect", ALL)
def test_predictions(dialect, content):
    """OpenAI's ``prediction`` is the text that is expected, as one or in parts."""
    body = {"model": "m", "messages": HI, "prediction": {"type": "content", "content": content}}
    raw = DIALECTS[dialect].read(body)
    assert raw.sampling.draft == Draft(text="a text", field="prediction")


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "tokens", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": "a", "more": 1}, "prediction.more"),
    ],
)
def test_predictions_refused(prediction, param):
    """An invalid prediction is refused with the name of the fault; completions accept none."""
    assert _refused({"messages": HI, "prediction": prediction}).param == param
    assert _refused({"prompt": "a", "prediction": {"type": "content", "content": "a"}}).param == "prediction"


@pytest.mark.parametrize("dialect", ["openai", "databricks", "mlflow"])
def test_hints_and_defaults_of_openai_s_clients(dialect):
    """A cache's retention is a hint, and medium the default verbosity: both are as if left out."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    read = DIALECTS[dialect].read
    assert read(body | {"prompt_cache_retention": "24h", "verbosity": "medium"}) == read(body)
    for param, value in {"prompt_cache_retention": "1h", "verbosity": "low"}.items():
        with pytest.raises(InvalidField) as found:
            read(body | {param: value})
        assert found.value.param == param
