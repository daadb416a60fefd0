"""The response tensors of TensorRT-LLM, and the text beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...interface.reply import Choice, Reply
from ...system.imports import Lazy
from .tensors import BYTES, Tensor, Values

if TYPE_CHECKING:
    import numpy as np
else:
    np = Lazy("numpy")

ANY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputField:
    """A response tensor.

    ``needs`` is what the request must ask for; None means that the tensor is always made. With ``of_text`` True it is
    sent for a text, with False for token ids, with None for both; a request can also ask for it by name.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    description: str
    make: Callable[[Reply, int, Sequence[int]], tuple[tuple[int, ...], Values]]
    needs: str | None = None
    of_text: bool | None = None


def tensor(name: str, reply: Reply, pad_id: int, prompt: Sequence[int] = ()) -> Tensor:
    """Return the tensor ``name`` of ``OUTPUTS``.

    The ids of shorter texts are padded with ``pad_id``; ``prompt`` comes before the ids of each.
    """
    field = OUTPUTS[name]
    shape, values = field.make(reply, pad_id, prompt)
    return Tensor(name=name, datatype=field.datatype, shape=shape, values=values)


def _padded(rows: Sequence[Sequence[Any]], dtype: str, pad: float) -> np.ndarray[Any, Any]:
    found = np.full((len(rows), max(map(len, rows))), pad, dtype)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found


def _output_ids(reply: Reply, pad_id: int, prompt: Sequence[int]) -> tuple[tuple[int, ...], Values]:
    ids = _padded([(*prompt, *choice.token_ids) for choice in reply.choices], "<i4", pad_id)
    return ids.shape, ids.reshape(-1)


def _sequence_length(reply: Reply, pad_id: int, prompt: Sequence[int]) -> tuple[tuple[int, ...], Values]:
    return (len(reply.choices),), np.array([len(prompt) + len(choice.token_ids) for choice in reply.choices], "<i4")


def _output_log_probs(reply: Reply, pad_id: int, prompt: Sequence[int]) -> tuple[tuple[int, ...], Values]:
    found = _padded([choice.token_logprobs for choice in reply.choices], "<f4", 0.0)
    return (1, *found.shape), found.reshape(-1)


def _cum_log_probs(reply: Reply, pad_id: int, prompt: Sequence[int]) -> tuple[tuple[int, ...], Values]:
    return (1, len(reply.choices)), np.array([choice.cum_logprob for choice in reply.choices], "<f4")


def _rows(data: bytes, num_rows: int) -> np.ndarray[Any, Any]:
    values = np.frombuffer(data, "<f4")
    return values.reshape(num_rows, -1) if num_rows else values.reshape(0, 0)


def _context_logits(reply: Reply, pad_id: int, prompt: Sequence[int]) -> tuple[tuple[int, ...], Values]:
    rows = _rows(reply.choices[0].context_logits, reply.usage.prompt_tokens)
    return (1, *rows.shape), rows.reshape(-1)


def _generation_logits(reply: Reply, pad_id: int, prompt: Sequence[int]) -> tuple[tuple[int, ...], Values]:
    """Return the logits; those of shorter texts are padded with zeros."""
    rows = [_rows(choice.generation_logits, len(choice.token_ids)) for choice in reply.choices]
    found = np.zeros((len(rows), max(map(len, rows)), max(row.shape[1] for row in rows)), "<f4")
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return (1, *found.shape), found.reshape(-1)


def _said(choice: Choice) -> bytes:
    return choice.text.encode()


def _text_output(reply: Reply, pad_id: int, prompt: Sequence[int]) -> tuple[tuple[int, ...], Values]:
    return (len(reply.choices),), tuple(map(_said, reply.choices))


OUTPUTS: Mapping[str, OutputField] = {
    field.name: field
    for field in (
        OutputField(
            name="output_ids",
            datatype="INT32",
            shape=(ANY, ANY),
            description="the tokens of each beam, including the one that ended it",
            make=_output_ids,
            of_text=False,
        ),
        OutputField(
            name="sequence_length",
            datatype="INT32",
            shape=(ANY,),
            description="the number of tokens of each beam",
            make=_sequence_length,
            of_text=False,
        ),
        OutputField(
            name="text_output",
            datatype=BYTES,
            shape=(ANY,),
            description="the text of each beam",
            make=_text_output,
            of_text=True,
        ),
        OutputField(
            name="output_log_probs",
            datatype="FP32",
            shape=(1, ANY, ANY),
            description="the log probability of each token",
            make=_output_log_probs,
            needs="logprobs",
        ),
        OutputField(
            name="cum_log_probs",
            datatype="FP32",
            shape=(1, ANY),
            description="the log probability of each beam",
            make=_cum_log_probs,
            needs="logprobs",
        ),
        OutputField(
            name="context_logits",
            datatype="FP32",
            shape=(1, ANY, ANY),
            description="the logits at each token of the prompt",
            make=_context_logits,
            needs="context_logits",
        ),
        OutputField(
            name="generation_logits",
            datatype="FP32",
            shape=(1, ANY, ANY, ANY),
            description="the logits that each token was chosen from",
            make=_generation_logits,
            needs="generation_logits",
        ),
    )
}
