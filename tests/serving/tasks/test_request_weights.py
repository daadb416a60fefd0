"""Weights that come with a request: what is checked of their form before an engine sees them."""

import dataclasses
import struct

import msgspec
import pytest

from mlflow_llm.serving.interface.engine import Capabilities
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import (
    LoraTask,
    PromptTable,
    RawChat,
    RawCompletion,
    RawEmbedding,
    RawSampling,
)
from mlflow_llm.serving.tasks.prepare import Limits, prepare

FLOATS = struct.pack("<8f", *range(8))
TASK = LoraTask(task_id=2**64 - 1, weights=FLOATS, config=((1, 0, 2), (2, 0, 2, 0)))
TABLE = PromptTable(data=struct.pack("<8f", *range(8)), num_tokens=2)


@pytest.fixture
def takes(endpoint_of):
    """Return an endpoint whose engine takes adapters and prompt tables, with a default adapter."""

    def build(**capabilities):
        view = endpoint_of(adapters=("legal",))
        can = Capabilities(**{"lora_tasks": True, "prompt_tables": True} | capabilities)
        info = msgspec.structs.replace(view.info, capabilities=can, hidden_size=4)
        return dataclasses.replace(view, info=info, default_adapter="legal")

    return build


def test_an_adapter_with_the_request_takes_the_place_of_the_default_one(takes):
    """A request's own adapter, with its tenant, replaces the endpoint's default adapter."""
    valid = prepare(RawCompletion(prompts=("hello",), lora_task=TASK), takes(), Limits(tenant="acme"))
    assert (valid.adapter, valid.lora_task, valid.tenant) == (None, TASK, "acme")
    plain = prepare(RawCompletion(prompts=("hello",)), takes(), Limits(tenant="acme"))
    assert (plain.adapter, plain.lora_task) == ("legal", None)


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        (TASK, {"adapter": "legal"}, "lora_task_id: 18446744073709551615 is not allowed; expected null where an"),
        (LoraTask(task_id=-1), {}, "lora_task_id: -1 is not allowed; expected an integer in [0, 18446744073709551615]"),
        (LoraTask(task_id=1, weights=FLOATS), {}, "lora_config: None is not allowed; expected a tensor"),
        (LoraTask(task_id=1, config=((1, 0, 2),)), {}, "lora_weights: None is not allowed; expected a tensor"),
        (LoraTask(task_id=1, weights=FLOATS, config=()), {}, "lora_config: [] is not allowed"),
        (LoraTask(task_id=1, weights=b"", config=((1, 0, 2),)), {}, "lora_weights: '0 bytes' is not allowed"),
        (LoraTask(task_id=1, weights=FLOATS, config=((1, 0),)), {}, "lora_config[0]: [1, 0] is not allowed"),
        (LoraTask(task_id=1, weights=FLOATS[4:], config=((1, 0, 1),) * 2), {}, "lora_weights: '28 bytes'"),
    ],
)  # fmt: skip
def test_a_task_of_another_form_is_refused_by_name(takes, task, more, message):
    """Ids out of range, a missing tensor and rows of other lengths are refused with field, value and bounds."""
    with pytest.raises(InvalidField) as error:
        prepare(RawCompletion(prompts=("hello",), lora_task=task, **more), takes())
    assert error.value.message.startswith(message)


def test_an_engine_without_them_refuses_both_by_name(takes):
    """A capability that an engine lacks is a refusal before it is asked, for encoders too."""
    with pytest.raises(InvalidField, match="lora_task_id"):
        prepare(RawCompletion(prompts=("hello",), lora_task=TASK), takes(lora_tasks=False))
    with pytest.raises(InvalidField, match="prompt_embedding_table"):
        prepare(RawCompletion(prompts=((1, 2),), prompt_table=TABLE), takes(prompt_tables=False))
    with pytest.raises(InvalidField, match="prompt_embedding_table"):
        prepare(RawEmbedding(inputs=("hello",), prompt_table=TABLE), takes())


def test_ids_after_the_vocabulary_are_rows_of_the_table(takes):
    """Ids beyond the vocabulary are rows of the prompt table and count as prompt tokens; an id after the last row is
    refused.
    """
    view = takes()
    size = view.info.vocab_size
    asked = RawSampling(max_tokens=1)
    valid = prepare(RawCompletion(prompts=((size, 5, size + 1),), prompt_table=TABLE, sampling=asked), view)
    assert (valid.sequences[0].prompt_token_ids, valid.prompt_table) == ((size, 5, size + 1), TABLE)
    assert valid.num_prompt_tokens == 3
    for table, first in ((TABLE, size + 2), (None, size)):
        with pytest.raises(
            InvalidField, match=rf"prompt\[0\]: {first} is not allowed; expected a token id below {first}"
        ):
            prepare(RawCompletion(prompts=((first,),), prompt_table=table, sampling=asked), view)


def test_echo_writes_the_texts_of_the_vocabulary_alone(takes):
    """Virtual tokens are not echoed, since they have no text, and are refused with log probabilities."""
    view = takes()
    size, (hello,) = view.info.vocab_size, view.text.encode("h", add_special_tokens=False)[:1]
    raw = RawCompletion(prompts=((size, hello, size + 1),), prompt_table=TABLE, echo=True)
    assert prepare(raw, view).echo == (view.text.decode((hello,), skip_special_tokens=False),)
    scored = msgspec.structs.replace(raw, sampling=RawSampling(logprobs=True, max_tokens=1))
    with pytest.raises(InvalidField, match="prompt_embedding_table"):
        prepare(scored, view)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (PromptTable(data=b"", num_tokens=0), "prompt_vocab_size: 0"),
        (PromptTable(data=FLOATS, num_tokens=3), "prompt_embedding_table: '8 numbers' is not allowed; expected [3, 4]"),
        (PromptTable(data=FLOATS, num_tokens=2**40), "prompt_vocab_size: 1099511627776"),
    ],
)
def test_a_table_of_another_size_is_refused(takes, table, message):
    """A prompt table must have prompt_vocab_size rows of the model's hidden size."""
    with pytest.raises(InvalidField) as error:
        prepare(RawCompletion(prompts=((1,),), prompt_table=table), takes())
    assert error.value.message.startswith(message)


def test_a_table_needs_token_ids(takes):
    """A prompt table with a text or a chat is refused, since only token ids name its rows."""
    for raw in (
        RawCompletion(prompts=("hello",), prompt_table=TABLE),
        RawChat(messages=(), prompt_table=TABLE),
    ):
        with pytest.raises(InvalidField, match="prompt_embedding_table"):
            prepare(raw, takes())
