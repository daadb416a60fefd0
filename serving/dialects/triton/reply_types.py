"""The objects of replies of ``generate`` and ``generate_stream``, as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from ...interface.type_schema import form
from ..base import Exchange
from ..kserve.replies import OUTPUTS
from ..kserve.tensors import BYTES, FLOATS

GenerateFinish = Literal["length", "stop_sequence", "eos_token"]


class GenerateDetails(TypedDict):
    """Costs are in milliseconds, null on endpoints that follow the document; waits are in microseconds."""

    finish_reason: GenerateFinish
    generated_tokens: int
    first_token_cost: float | None
    decode_cost: float | None
    batch_size: list[int]
    queue_wait_time: list[int]


class PerfStat(TypedDict):
    """The times that each step took, in milliseconds, and waited, in microseconds."""

    prefill_time: float | None
    decode_time_arr: list[float]
    batch_size: list[int]
    queue_wait_time: list[int]


class Generated(TypedDict):
    """The text after ``text_input``, in MindIE's form."""

    id: str
    model_name: str
    model_version: str | None
    text_output: str
    details: NotRequired[GenerateDetails]
    perf_stat: NotRequired[PerfStat]


class GenerateEventDetails(TypedDict):
    """The counts and times of the steps since the event before; ``finish_reason`` is in the last event."""

    finish_reason: NotRequired[GenerateFinish]
    generated_tokens: int
    first_token_cost: float | None
    decode_cost: float | None
    batch_size: int | None
    queue_wait_time: int


class GeneratedEvent(TypedDict):
    """The data of an event in MindIE's form."""

    id: str
    model_name: str
    model_version: str | None
    text_output: str
    details: NotRequired[GenerateEventDetails]
    perf_stat: NotRequired[PerfStat]


def _values(datatype: str) -> Any:
    """Return the type of a tensor in JSON: one value, or a flat list."""
    if datatype == BYTES:
        return str | list[str]
    return float | list[float] if datatype in FLOATS else int | list[int]


TritonGenerated = form(
    "TritonGenerated",
    "A reply in Triton's own form: a key for each tensor that the request asks for.",
    {
        "id": NotRequired[str],
        "model_name": str,
        "model_version": str,
        **{name: NotRequired[_values(field.datatype)] for name, field in OUTPUTS.items()},
    },
)


class TritonEvent(TypedDict):
    """The data of an event in Triton's own form: a text, or tokens if the prompt was token ids."""

    id: NotRequired[str]
    model_name: str
    model_version: str
    text_output: NotRequired[str]
    output_ids: NotRequired[list[int]]


EXAMPLE: dict[str, Any] = {"text_input": "Once upon a time", "parameters": {"max_new_tokens": 16}}
WHOLE = Exchange(example=EXAMPLE, whole=Generated | TritonGenerated)
STREAMED = Exchange(example=EXAMPLE, event=GeneratedEvent | TritonEvent, ends="The last event says why the text ended.")
TRITON = Exchange(whole=TritonGenerated, event=TritonEvent)
