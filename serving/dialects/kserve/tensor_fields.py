"""The request tensors of TensorRT-LLM, each defined once: name, datatype, shape, and where its value goes.

Source: TensorRT-LLM's table of an inference request. Added are the names that its models for Triton use, and texts for
callers without a tokenizer. Shapes are strict except for the batch dimension of 1: [1] means the same as [1, 1], and
[n] the same as [1, n]. Scalars may be sent in ``parameters`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...interface.errors import InvalidField
from ...interface.readers import INT32_MAX, UINT64_MAX, Reader, any_of, boolean, integer, number, one_of, reader
from ...interface.request import MAX_CHOICES
from ...system.imports import Lazy
from .tensors import BOOL, BYTES, Tensor

if TYPE_CHECKING:
    import numpy as np
else:
    np = Lazy("numpy")

ANY = -1  # a size that the request chooses
NEAR_INFINITY = 1e9
INT32, UINT64 = ("INT32",), ("UINT64",)
COUNT = ("INT32", "UINT32")  # older versions of the backend, and their clients, have the unsigned one
FP = ("FP32", "FP16", "BF16")  # "float (model data type)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorField:
    """A request tensor.

    ``shape`` is the document's, with ``ANY`` for a size that the request chooses. ``scalar`` reads a single value,
    ``read`` a whole tensor. ``target`` is what the value sets, the same for two names of one thing; "" if the only
    accepted value asks for nothing.
    """

    name: str
    datatypes: tuple[str, ...]
    shape: tuple[int, ...]
    target: str
    description: str
    scalar: Reader[Any] | None = None
    read: Callable[[Tensor], Any] | None = None

    def value(self, tensor: Tensor) -> Any:
        """Return the tensor's value. Raises ``InvalidField`` for a datatype or a shape that is not accepted."""
        if tensor.datatype not in self.datatypes:
            raise InvalidField(self.name, tensor.datatype, f"the datatype {' or '.join(self.datatypes)}")
        if not any(_fits(tensor.shape, shape) for shape in self.shapes):
            allowed = " or ".join(str(list(shape)).replace("-1", "n") for shape in self.shapes)
            raise InvalidField(self.name, list(tensor.shape), f"the shape {allowed}")
        if self.scalar is None:
            assert self.read is not None
            return self.read(tensor)
        return self.scalar(tensor.array[0].item(), self.name)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The accepted shapes: the document's, with and without the batch dimension of 1."""
        if self.scalar is not None or self.target == "text":
            return ((1,), (1, 1))
        if self.target == "prompt":
            return (self.shape,)
        if self.target == "prompt_table":
            return ((ANY, ANY), (1, ANY, ANY), (ANY,))
        inner = self.shape[1:] if len(self.shape) > 1 and self.shape[0] == 1 else self.shape
        return ((1, *inner), inner)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (ANY, size) for size, w in zip(shape, wanted, strict=True))


def _ids(tensor: Tensor) -> tuple[int, ...]:
    """Read token ids; validation checks later whether the model has them."""
    if tensor.array.size and tensor.array.min() < 0:
        raise InvalidField(tensor.name, int(tensor.array.min()), f"token ids, in [0, {INT32_MAX}]")
    return tuple(tensor.array.tolist())


def _prompt(tensor: Tensor) -> tuple[int, ...]:
    if not tensor.array.size:
        raise InvalidField(tensor.name, [], "at least one token id")
    return _ids(tensor)


def _floats(tensor: Tensor) -> bytes:
    """Return the values as little-endian float32."""
    values = tensor.array.astype("<f4", copy=False)
    if not np.isfinite(values).all():
        raise InvalidField(tensor.name, "NaN or an infinity", "finite numbers")
    return values.tobytes()


def _bias(tensor: Tensor) -> bytes:
    """Read a bias for each token of the vocabulary, as ``_logits`` does; an empty tensor is refused."""
    if not tensor.array.size:
        raise InvalidField(tensor.name, list(tensor.shape), "the shape [1, vocab_size]")
    return _logits(tensor)


def _logits(tensor: Tensor) -> bytes:
    """Return the values as little-endian float32; -inf means a token of probability 0."""
    values = tensor.array.astype("<f4", copy=False)
    if np.isnan(values).any() or np.isposinf(values).any():
        raise InvalidField(tensor.name, "NaN or an infinity", "numbers and -inf")
    return values.tobytes()


def _draft_logits(tensor: Tensor) -> tuple[int, bytes]:
    """Return the number of rows, and their values."""
    return tensor.shape[-2], _logits(tensor)


def _words(tensor: Tensor) -> tuple[tuple[int, ...], ...]:
    """Read sequences of tokens: row 0 has their ids, row 1 the end of each sequence, then -1::

    [[5, 7, 3,  9,  2],     (5, 7, 3), (9, 2)
     [3, 5, -1, -1, -1]]
    """
    ids, ends = tensor.array.reshape(2, -1)
    found: list[tuple[int, ...]] = []
    start, over = 0, False
    for place, end in enumerate(ends.tolist()):
        if end == -1:
            over = True
            continue
        if over or not start < end <= len(ids):
            allowed = f"ends of words, each above the one before and at most {len(ids)}, then -1"
            raise InvalidField(f"{tensor.name}[0][1][{place}]", end, allowed)
        word = ids[start:end]
        if word.min() < 0:
            raise InvalidField(tensor.name, int(word.min()), f"token ids, in [0, {INT32_MAX}]")
        found.append(tuple(word.tolist()))
        start = end
    if len(ids) and not found:
        raise InvalidField(f"{tensor.name}[0][1]", ends.tolist(), "the end of each word; no words are [1, 2, 0]")
    return tuple(found)


def _text(tensor: Tensor) -> str:
    return _decoded(tensor.texts[0], tensor.name)


def _texts(tensor: Tensor) -> tuple[str, ...]:
    """Read texts. Empty ones are none: clients of TensorRT-LLM's backend send ``""`` for no words."""
    found = (_decoded(entry, f"{tensor.name}[{i}]") for i, entry in enumerate(tensor.texts))
    return tuple(entry for entry in found if entry)


def _decoded(entry: bytes, path: str) -> str:
    try:
        return entry.decode()
    except UnicodeDecodeError:
        raise InvalidField(path, "bytes", "UTF-8") from None


def _lora_weights(tensor: Tensor) -> tuple[tuple[int, int], bytes]:
    return (tensor.shape[-2], tensor.shape[-1]), _floats(tensor)


def _lora_config(tensor: Tensor) -> tuple[tuple[int, ...], ...]:
    if tensor.shape[-1] not in (3, 4):
        raise InvalidField(tensor.name, list(tensor.shape), "rows of [module_id, layer, rank] or those and is_dora")
    return tuple(map(tuple, tensor.array.reshape(-1, tensor.shape[-1]).tolist()))


def _prompt_table(tensor: Tensor) -> tuple[int | None, bytes]:
    """Return the number of rows (None if the shape does not have it), and the values as little-endian float32."""
    return (tensor.shape[-2] if len(tensor.shape) > 1 else None), _floats(tensor)


def _scalar(
    names: str, datatypes: tuple[str, ...], read: Reader[Any], target: str, description: str
) -> tuple[TensorField, ...]:
    return tuple(
        TensorField(name=name, datatypes=datatypes, shape=(1,), target=target, description=description, scalar=read)
        for name in names.split()
    )


def _tensor(
    name: str,
    datatypes: tuple[str, ...],
    shape: tuple[int, ...],
    read: Callable[[Tensor], Any],
    target: str,
    description: str,
) -> TensorField:
    return TensorField(name=name, datatypes=datatypes, shape=shape, target=target, description=description, read=read)


_NUMBER = integer(-INT32_MAX - 1, INT32_MAX)


@reader(**any_of(_NUMBER.schema, boolean.schema))
def _number_or_switch(value: Any, path: str) -> int:
    return int(value) if isinstance(value, bool) else _NUMBER(value, path)


_FINITE = number(-NEAR_INFINITY, NEAR_INFINITY)
_TOKEN_OR_NONE = integer(-1, INT32_MAX)
TOKEN_LISTS = (
    _tensor("input_ids", INT32, (1, ANY), _prompt, "prompt", "the prompt's tokens"),
    _tensor("text_input", (BYTES,), (1,), _text, "text", "the prompt as text, instead of input_ids"),
)
FIELDS: Mapping[str, TensorField] = {
    field.name: field
    for field in (
        *TOKEN_LISTS,
        *_scalar("input_lengths", COUNT, integer(1, INT32_MAX), "prompt_length", "the number of input_ids"),
        *_scalar("request_output_len max_tokens", COUNT, integer(1, INT32_MAX), "max_tokens", "tokens to generate"),
        *_scalar("streaming stream", (BOOL,), boolean, "streaming", "one response per token, over a gRPC stream"),
        *_scalar("beam_width", COUNT, integer(1, MAX_CHOICES), "beam_width", "above 1: beam search; default 1"),
        *_scalar("temperature", FP, number(0, NEAR_INFINITY), "temperature", "default 1"),
        *_scalar("runtime_top_k top_k", COUNT, integer(0, INT32_MAX), "top_k", "default 0: no limit"),
        *_scalar(
            "runtime_top_p top_p",
            FP,
            number(0, 1),
            "top_p",
            "default 0: no limit; greedy if top_k is 0 too",
        ),
        *_scalar("len_penalty length_penalty", FP, number(-10, 10), "len_penalty", "of beam search; default 0"),
        *_scalar(
            "early_stopping",
            ("INT32", BOOL),
            _number_or_switch,
            "early_stopping",
            "beam search ends: with 0, the default, when no better text is likely; with 1 when beam_width texts are "
            "complete; else when no better text is possible",
        ),
        *_scalar("repetition_penalty", FP, number(0, NEAR_INFINITY, above=True), "repetition_penalty", "default 1"),
        *_scalar(
            "min_length min_tokens",
            COUNT,
            integer(0, INT32_MAX),
            "min_tokens",
            "minimum number of tokens before the text may end",
        ),
        *_scalar("presence_penalty", FP, _FINITE, "presence_penalty", "default 0; includes the prompt's tokens"),
        *_scalar("frequency_penalty", FP, _FINITE, "frequency_penalty", "default 0; includes the prompt's tokens"),
        *_scalar("no_repeat_ngram_size", COUNT, integer(0, INT32_MAX), "no_repeat_ngram_size", "default 0: no limit"),
        *_scalar("random_seed seed", UINT64, integer(0, UINT64_MAX), "seed", "default 0"),
        *_scalar("end_id", COUNT, _TOKEN_OR_NONE, "end_id", "token that ends the text; default -1: the model's own"),
        *_scalar(
            "pad_id",
            COUNT,
            _TOKEN_OR_NONE,
            "pad_id",
            "token that pads the shorter texts of a beam search; default end_id",
        ),
        _tensor("embedding_bias", FP, (1, ANY), _bias, "embedding_bias", "added to the logits, [1, vocab_size]"),
        _tensor(
            "bad_words_list", INT32, (1, 2, ANY), _words, "bad_word_ids", "sequences of tokens that are not generated"
        ),
        _tensor(
            "stop_words_list", INT32, (1, 2, ANY), _words, "stop_sequences", "sequences of tokens that end the text"
        ),
        _tensor("bad_words", (BYTES,), (ANY,), _texts, "bad_words", "texts that are not generated"),
        _tensor("stop_words", (BYTES,), (ANY,), _texts, "stop", "texts that end the text"),
        _tensor(
            "prompt_embedding_table",
            FP,
            (ANY, ANY),
            _prompt_table,
            "prompt_table",
            "vectors of virtual tokens, [prompt_vocab_size, hidden size]: token ids from vocab_size on",
        ),
        *_scalar("prompt_vocab_size", COUNT, integer(1, INT32_MAX), "prompt_vocab_size", "number of rows of the table"),
        *_scalar("lora_task_id", UINT64, integer(0, UINT64_MAX), "lora_task_id", "the adapter's id"),
        _tensor(
            "lora_weights",
            FP,
            (ANY, ANY),
            _lora_weights,
            "lora_weights",
            "the weights, with the first request of an id",
        ),
        _tensor(
            "lora_config", INT32, (ANY, ANY), _lora_config, "lora_config", "rows of [module_id, layer, rank(, is_dora)]"
        ),
        *_scalar(
            "exclude_input_in_output",
            (BOOL,),
            boolean,
            "exclude_prompt",
            "false: the prompt before the text and the tokens; default true",
        ),
        *_scalar(
            "num_return_sequences",
            COUNT,
            integer(1, 1),
            "",
            "only 1: there is one text for each beam",
        ),
        *_scalar(
            "return_perf_metrics",
            (BOOL,),
            one_of(False, why="times are in the server's metrics and traces"),
            "",
            "only false: times are in the server's metrics and traces",
        ),
        *_scalar("return_log_probs", (BOOL,), boolean, "logprobs", "output_log_probs and cum_log_probs"),
        *_scalar("return_context_logits", (BOOL,), boolean, "context_logits", "context_logits"),
        *_scalar("return_generation_logits", (BOOL,), boolean, "generation_logits", "generation_logits"),
        _tensor("draft_input_ids", INT32, (ANY,), _ids, "draft_ids", "the expected tokens of the text"),
        _tensor(
            "draft_logits", FP, (ANY, ANY), _draft_logits, "draft_logits", "the logits from which they were sampled"
        ),
    )
}
