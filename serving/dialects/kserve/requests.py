"""Convert a call of KServe's protocol to a raw request, with TensorRT-LLM's defaults.

These apply whatever defaults the model was logged with: greedy unless top_k or top_p is set, seed 0, no length penalty,
and presence and frequency penalties that count the prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ...interface.errors import InvalidField
from ...interface.labels import MAX_REQUEST_ID, Labels
from ...interface.readers import boolean, integer, short_text, string
from ...interface.request import Draft, EarlyStopping, LoraTask, PromptTable, RawBeams, RawCompletion, RawSampling
from ..fields.fields import unknown_field
from ..fields.label_fields import USER, user
from ..fields.tables import MAX_CACHE_SALT
from .body import InferCall
from .replies import OUTPUTS
from .tensor_fields import FIELDS, TensorField

BINARY_OUTPUT = "binary_data_output"
STREAMING = "Streaming"
DAY_US = 86400 * 10**6  # microseconds
_NO_SEQUENCES = "0: each request stands by itself"
_STREAMS = "POST …/generate_stream, or gRPC's ModelStreamInfer, sends tokens as they come"
_BOTH = "lora_weights and lora_config together, or neither of an adapter that is cached"
# the parameters of a request that are not tensors
PARAMETERS: Mapping[str, str] = {
    BINARY_OUTPUT: "return outputs as bytes unless they say otherwise",
    "timeout": "microseconds that this request may take",
    "adapter": "a LoRA adapter of the model",
    "user": USER,
    "cache_salt": "cached prompt prefixes are shared only with requests of the same salt and the same tenant",
    STREAMING: "as the tensor streaming has it, with which clients of TensorRT-LLM's backend send it",
}
_NAMES = {field.target: field.name for field in reversed(tuple(FIELDS.values()))}


class Echo(Struct, frozen=True, kw_only=True, array_like=True):
    """The parts of a call that its reply needs.

    ``outputs`` are names, each with whether it is binary; () means all available. If ``with_prompt``, the prompt's
    tokens come before those of each text. If ``streams``, several responses may follow each other; if ``empty_final``,
    the last one is empty.
    """

    id: str = ""
    outputs: tuple[tuple[str, bool], ...] = ()
    binary: bool = False
    is_text: bool = False
    pad_id: int | None = None
    logprobs: bool = False
    context_logits: bool = False
    generation_logits: bool = False
    with_prompt: bool = False
    streams: bool = False
    empty_final: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Echo)


def echo_of(echoed: bytes) -> Echo:
    """Decode what ``raw_request`` kept of a call."""
    return _decoder.decode(echoed) if echoed else Echo()


def raw_request(call: InferCall, *, streams: bool = False, empty_final: bool = False) -> RawCompletion:
    """Convert a call. For ``streams`` and ``empty_final`` see ``Echo``. Raises ``InvalidField``."""
    found, names = _values(call)
    stream, streaming = found.pop("streaming", False), names.get("streaming", "streaming")
    if _read(call.parameters, STREAMING, boolean) not in (None, stream):
        raise InvalidField(f"parameters.{STREAMING}", call.parameters[STREAMING], f"{stream}, as {streaming} has it")
    if stream and not streams:
        raise InvalidField(streaming, True, f"false: infer answers once; {_STREAMS}")
    parameters = {name: value for name, value in call.parameters.items() if name not in FIELDS}
    if stream and found.get("beam_width", 1) > 1:
        raise InvalidField(streaming, True, "false with a beam_width above 1: which texts are best is known at the end")
    with_prompt = not found.pop("exclude_prompt", True)
    echo = msgspec.structs.replace(
        _echo(call, parameters, found), with_prompt=with_prompt, streams=streams, empty_final=empty_final
    )
    prompt: str | tuple[int, ...] = found.pop("text") if "text" in found else found.pop("prompt")
    timeout = parameters.get("timeout")
    return RawCompletion(
        prompts=(prompt,),
        use_raw_prompt=True,
        stream=stream,
        echo=True if with_prompt else None,
        adapter=_read(parameters, "adapter", string),
        labels=_labels(call, _read(parameters, "user", user)),
        cache_salt=_read(parameters, "cache_salt", short_text(MAX_CACHE_SALT)),
        lora_task=_lora_task(found),
        prompt_table=_prompt_table(found),
        sampling=_sampling(found, names, timeout),
        echoed=_encoder.encode(echo),
        sent_as={"prompt" if target == "text" else target: name for target, name in names.items()},
    )


def _labels(call: InferCall, user: str | None) -> Labels | None:
    """Return the labels: the user, and the call's id unless it is too long for one, which the reply repeats anyway."""
    is_label = 0 < len(call.id) <= MAX_REQUEST_ID and "\0" not in call.id
    if not user and not is_label:
        return None
    return Labels(user=user or "", client_request_id=call.id if is_label else "")


def _values(call: InferCall) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of tensors and parameters by target, and the names that they were sent by.

    Raises ``InvalidField`` for two names of one thing, and for a missing prompt or ``max_tokens``.
    """
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, tensor in call.inputs.items():
        field = FIELDS.get(name)
        if field is None:
            raise unknown_field(name, tensor.datatype, FIELDS)
        _set(found, names, field, field.value(tensor))
    for name, value in call.parameters.items():
        field = FIELDS.get(name)
        if field is None:
            continue  # one of ``PARAMETERS``, or unknown: ``_echo`` checks that
        if field.scalar is None:
            raise InvalidField(f"parameters.{name}", value, f"no such parameter: {name} is a tensor, one of inputs")
        _set(found, names, field, field.scalar(value, f"parameters.{name}"))
    if ("text" in found) == ("prompt" in found):
        given = "both" if "text" in found else None
        raise InvalidField("input_ids", given, "input_ids, the prompt's tokens [1, n], or text_input instead")
    _check_length(found.pop("prompt_length", None), found.get("prompt"))
    if "max_tokens" not in found:
        name = "max_tokens" if "text" in found else "request_output_len"
        raise InvalidField(name, None, "the maximum number of tokens to generate, INT32 [1, 1]")
    return found, names


def _set(found: dict[str, Any], names: dict[str, str], field: TensorField, value: Any) -> None:
    """Set the field's target, if it has one. Raises ``InvalidField`` if another name has set it."""
    target, name = field.target, field.name
    if not target:
        return
    if target in names:
        raise InvalidField(name, "given", f"only one of {names[target]} and {name}: they are the same")
    names[target] = name
    found[target] = value


def _check_length(length: int | None, prompt: Sequence[int] | None) -> None:
    """Check ``input_lengths``. A request has one prompt, so there is no padding that it could tell from the prompt."""
    if length is None:
        return
    if prompt is None:
        raise InvalidField("input_lengths", length, "null with text_input: it is the number of input_ids")
    if length != len(prompt):
        raise InvalidField("input_lengths", length, f"{len(prompt)}, the number of input_ids: they are not padded")


def _echo(call: InferCall, parameters: Mapping[str, Any], found: dict[str, Any]) -> Echo:
    for name, value in parameters.items():
        if name in ("sequence_id", "sequence_start", "sequence_end", "priority"):
            if value not in (0, "", False):
                raise InvalidField(
                    f"parameters.{name}", value, "0: there is one" if name == "priority" else _NO_SEQUENCES
                )
        elif name not in PARAMETERS:
            raise unknown_field(name, value, (*PARAMETERS, *FIELDS), "parameters.")
    all_binary = parameters.get(BINARY_OUTPUT)
    binary = False if all_binary is None else boolean(all_binary, f"parameters.{BINARY_OUTPUT}")
    asked = {name: bool(found.get(name)) for name in ("logprobs", "context_logits", "generation_logits")}
    seen: set[str] = set()
    for place, output in enumerate(call.outputs):
        path = f"outputs[{place}].name"
        if output.name not in OUTPUTS:
            raise InvalidField(path, output.name, "one of " + ", ".join(OUTPUTS))
        if output.name in seen:
            raise InvalidField(path, output.name, "each output once")
        seen.add(output.name)
        needs = OUTPUTS[output.name].needs
        if needs is not None and not asked[needs]:
            raise InvalidField(path, output.name, f"an output that is made: set {_NAMES[needs]} to true")
    outputs = tuple((one.name, binary if one.binary is None else one.binary) for one in call.outputs)
    pad_id = found.pop("pad_id", None)
    end_id = found.get("end_id", -1)
    if pad_id is None or pad_id < 0:
        pad_id = end_id if end_id >= 0 else None
    return Echo(id=call.id, outputs=outputs, binary=binary, is_text="text" in found, pad_id=pad_id, **asked)


def _read(parameters: Mapping[str, Any], name: str, read: Any) -> Any:
    value = parameters.get(name)
    return None if value is None else read(value, f"parameters.{name}")


def _lora_task(found: dict[str, Any]) -> LoraTask | None:
    weights, config = found.pop("lora_weights", None), found.pop("lora_config", None)
    if "lora_task_id" not in found:
        for name, value in (("lora_weights", weights), ("lora_config", config)):
            if value is not None:
                raise InvalidField(name, "given", "null without lora_task_id")
        return None
    if (weights is None) != (config is None):
        missing = "lora_weights" if weights is None else "lora_config"
        raise InvalidField(missing, None, _BOTH)
    task_id = found.pop("lora_task_id")
    if weights is None:
        return LoraTask(task_id=task_id)
    (rows, _), data = weights
    if rows != len(config):
        raise InvalidField("lora_config", f"{len(config)} rows", f"{rows}, as lora_weights has")
    return LoraTask(task_id=task_id, weights=data, config=config)


def _prompt_table(found: dict[str, Any]) -> PromptTable | None:
    table, size = found.pop("prompt_table", None), found.pop("prompt_vocab_size", None)
    if table is None and size is None:
        return None
    if table is None or size is None:
        missing = "prompt_embedding_table" if table is None else "prompt_vocab_size"
        raise InvalidField(missing, None, "prompt_embedding_table and prompt_vocab_size together")
    rows, data = table
    if rows not in (None, size):
        raise InvalidField("prompt_vocab_size", size, f"{rows}, the rows of prompt_embedding_table")
    return PromptTable(data=data, num_tokens=size)


def _sampling(found: dict[str, Any], names: Mapping[str, str], timeout: Any) -> RawSampling:
    beams = _beams(found, names)
    presence, frequency = found.pop("presence_penalty", 0.0), found.pop("frequency_penalty", 0.0)
    bad_words = (*found.pop("bad_words", ()), *found.pop("bad_word_ids", ()))
    end_id = found.pop("end_id", -1)
    drawn = {"temperature": 0.0, "top_k": 0, "top_p": 1.0} if beams is not None else _drawn(found)
    optional = {name: found.pop(name, None) or None for name in ("stop", "stop_sequences", "embedding_bias")}
    sampling = RawSampling(
        max_tokens=found.pop("max_tokens"),
        min_tokens=found.pop("min_tokens", 0),
        **drawn,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=found.pop("repetition_penalty", 1.0),
        presence_penalty=presence,
        frequency_penalty=frequency,
        penalize_prompt=True if presence or frequency else None,
        seed=found.pop("seed", 0),
        n=None if beams is None else beams.width,
        beams=beams,
        bad_words=bad_words or None,
        no_repeat_ngram_size=found.pop("no_repeat_ngram_size", 0) or None,
        end_id=None if end_id < 0 else end_id,
        logprobs=found.pop("logprobs", False) or None,
        context_logits=found.pop("context_logits", False) or None,
        generation_logits=found.pop("generation_logits", False) or None,
        draft=_draft(found),
        timeout=None if timeout is None else integer(1, DAY_US)(timeout, "parameters.timeout") / 1e6,
        **optional,
    )
    assert not found, f"read and not used: {', '.join(found)}"
    return sampling


def _drawn(found: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling settings: greedy if neither top_k nor top_p is set."""
    temperature, top_k, top_p = found.pop("temperature", 1.0), found.pop("top_k", 0), found.pop("top_p", 0.0)
    if not top_k and not top_p:
        return {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p or 1.0}


def _beams(found: dict[str, Any], names: Mapping[str, str]) -> RawBeams | None:
    """Read the beam search. For a single beam its fields are ignored, because clients send them with each request.

    ``names`` are those by which fields were sent.
    """
    width, penalty, early = found.pop("beam_width", 1), found.pop("len_penalty", 0.0), found.pop("early_stopping", 0)
    if width == 1:
        return None
    for name, nothing in (("temperature", (0, 1)), ("top_k", (0, 1)), ("top_p", (0, 1))):
        if (value := found.pop(name, 0)) not in nothing:
            raise InvalidField(names[name], value, f"0 or 1 with a beam_width of {width}: nothing is sampled")
    stopping: EarlyStopping = "heuristic" if early == 0 else "first" if early == 1 else "never"
    return RawBeams(width=width, length_penalty=penalty, early_stopping=stopping, field="beam_width")


def _draft(found: dict[str, Any]) -> Draft | None:
    ids, logits = found.pop("draft_ids", None), found.pop("draft_logits", None)
    if ids is None:
        if logits is not None:
            raise InvalidField("draft_logits", "given", "null without draft_input_ids")
        return None
    if logits is not None and logits[0] != len(ids):
        raise InvalidField("draft_logits", f"{logits[0]} rows", f"{len(ids)}, one for each of draft_input_ids")
    if not ids:
        return None
    return Draft(token_ids=ids, logits=None if logits is None else logits[1], field="draft_input_ids")
