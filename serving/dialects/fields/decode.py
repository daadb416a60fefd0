"""Build a raw request from a body's fields, for OpenAI's dialect and those with its fields (Databricks, MLflow, …)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...interface.errors import InvalidField
from ...interface.labels import take_labels
from ...interface.request import RawBeams, RawChat, RawCompletion, RawEmbedding, RawRequest, RawSampling, Task
from .beam_fields import beams_of
from .chat_end import chat_end
from .constraint_fields import only
from .fields import Table, task_of
from .scoring_fields import read_score
from .tool_fields import chosen

# removes the fields of a beam search from the first argument; the second has the sampling fields, the third is the body
Beams = Callable[[dict[str, Any], Mapping[str, Any], Mapping[str, Any]], RawBeams | None]


def decode(tables: Mapping[Task, Table], body: Any, task: Task | None, beams_of: Beams = beams_of) -> RawRequest:
    """Read a body, without changing it. ``beams_of`` reads the dialect's own beam search. Raises ``InvalidField``."""
    name = task_of(body, task)
    found = tables[name].read(body)
    take_labels(found)
    if name == "embeddings":
        inputs, batched = found.pop("inputs")
        return RawEmbedding(inputs=inputs, batched=batched, **found)
    if name == "score":
        return read_score(found)
    sampling = {key.removeprefix("sampling."): found.pop(key) for key in list(found) if key.startswith("sampling.")}
    if _join_max_tokens(found, sampling):
        found["sent_as"] = {"max_tokens": "max_completion_tokens"}
    if constraints := [found.pop(key) for key in list(found) if key.startswith("constraint.")]:
        sampling["constraint"] = only(constraints)
    if (beams := beams_of(found, sampling, body)) is not None:
        sampling["beams"] = beams
    if found.get("usage_chunks", "none") != "none" and not found.get("stream"):
        raise InvalidField("stream_options", body["stream_options"], "null unless stream is true")
    if name == "chat":
        if sampling.get("top_logprobs") is not None and not sampling.get("logprobs"):
            raise InvalidField("top_logprobs", sampling["top_logprobs"], "null unless logprobs is true")
        if "tool_choice" in found:
            found["tool_choice"] = chosen(found["tool_choice"], found.get("tools"))
        end = chat_end(found)
        return RawChat(sampling=msgspec.convert(sampling, RawSampling), end=end, **found)
    prompts, batched = found.pop("prompts")
    if sampling.get("top_logprobs") is not None:
        sampling["logprobs"] = True
    return RawCompletion(prompts=prompts, batched=batched, sampling=msgspec.convert(sampling, RawSampling), **found)


def _join_max_tokens(found: dict[str, Any], sampling: dict[str, Any]) -> bool:
    """Make both names one setting; return whether only the newer one was sent."""
    newer = found.pop("max_completion_tokens", None)
    if newer is None:
        return False
    is_alone = "max_tokens" not in sampling
    older = sampling.setdefault("max_tokens", newer)
    if older != newer:
        raise InvalidField("max_completion_tokens", newer, f"the same as max_tokens ({older}), or only one of them")
    return is_alone
