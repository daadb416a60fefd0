"""The JSON objects of OpenAI's replies, which the Databricks and MLflow dialects send too, with extras."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...interface.errors import ServingError
from ...interface.reply import (
    CallDelta,
    Choice,
    Delta,
    Done,
    Ended,
    Piece,
    Reply,
    ReplyCall,
    ReplyFinish,
    TextLogprob,
    Usage,
)
from ...interface.request import ValidRequest
from .. import sse
from ..text_template import TextTemplate
from .reply_types import (
    AlternativeToken,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    CustomCall,
    Finish,
    FunctionCall,
    ScoredToken,
    TextChoice,
    TextLogprobs,
)
from .scoring_replies import score_reply

DONE = b"data: [DONE]\n\n"


class Style(NamedTuple):
    """The differences between the dialects that use OpenAI's objects.

    ``usage_details``: usage has prompt_tokens_details, and completion_tokens_details if there was reasoning, a
    prediction or a draft. ``usage_in_last``: a stream's last chunk with choices carries usage even if it was not asked
    for. ``index_by_prompt``: a completion's index is that of its prompt (the Databricks document), not its place among
    all choices, on endpoints whose profile asks for it. ``embedding_id``: embeddings carry an id.
    """

    usage_details: bool = True
    usage_in_last: bool = False
    index_by_prompt: bool = False
    embedding_id: bool = False


def event(data: dict[str, Any]) -> bytes:
    """Encode one server-sent event. It has only ``data:`` lines, because MLflow's client refuses any other."""
    return sse.event(data)


def usage(request: ValidRequest, counts: Usage, style: Style) -> dict[str, Any]:
    """Return the ``usage`` object; that of embeddings has only the prompt and the total."""
    found: dict[str, Any] = {"prompt_tokens": counts.prompt_tokens}
    if request.task != "embeddings":
        found["completion_tokens"] = counts.completion_tokens
    found["total_tokens"] = counts.total_tokens
    if style.usage_details and request.task != "embeddings":
        found["prompt_tokens_details"] = {"cached_tokens": counts.cached_tokens}
        if details := completion_details(counts):
            found["completion_tokens_details"] = details
    return found


def completion_details(counts: Usage) -> dict[str, int]:
    """Return ``completion_tokens_details``: OpenAI's fields and ``draft_details``, without those that do not apply."""
    found: dict[str, int] = {}
    if counts.reasoning_tokens:
        found["reasoning_tokens"] = counts.reasoning_tokens
    if counts.accepted_prediction_tokens is not None:
        found["accepted_prediction_tokens"] = counts.accepted_prediction_tokens
        found["rejected_prediction_tokens"] = counts.rejected_prediction_tokens or 0
    return found | draft_details(counts)


def draft_details(counts: Usage) -> dict[str, int]:
    """Return the counts of drafts from all sources, predictions included; OpenAI's objects do not have them."""
    if not counts.draft_tokens:
        return {}
    return {"draft_tokens": counts.draft_tokens, "accepted_draft_tokens": counts.accepted_draft_tokens}


def head(request: ValidRequest, streamed: bool = False) -> dict[str, Any]:
    """Return id, object, created and model, with which every reply and chunk begins."""
    if request.task == "chat":
        prefix, kind = "chatcmpl-", "chat.completion.chunk" if streamed else "chat.completion"
    else:
        prefix, kind = "cmpl-", "text_completion"
    return {"id": prefix + request.request_id, "object": kind, "created": request.created, "model": model_name(request)}


def databricks_output(trace: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``databricks_output``, which has the trace of a request that asks for it; nothing without a trace."""
    return {} if trace is None else {"databricks_output": {"trace": trace}}


def model_name(request: ValidRequest) -> str:
    """Return the model's name; if an adapter answers, ``endpoint:adapter``, as in ``/v1/models``.

    Caches and costs depend on this name.
    """
    if request.adapter is None or request.model.endswith(f":{request.adapter}"):
        return request.model
    return f"{request.model}:{request.adapter}"


def reply(request: ValidRequest, whole: Reply, style: Style) -> dict[str, Any]:
    """Return the object of a reply that is not streamed: a chat or text completion, embeddings, or scores."""
    if request.task == "embeddings":
        return _embeddings(request, whole, style)
    if request.task == "score":
        return {**score_reply(request, whole, model_name(request))}
    choice = _chat_choice if request.task == "chat" else _text_choice
    choices = [choice(request, entry, style) for entry in whole.choices]
    return {**head(request), "choices": choices, "usage": usage(request, whole.usage, style)}


def _chat_choice(request: ValidRequest, choice: Choice, style: Style) -> ChatChoice:
    return {
        "index": choice.index,
        "message": message(choice),
        "logprobs": chat_logprobs(request, choice.logprobs),
        "finish_reason": finish_reason(choice.finish_reason),
    }


def message(choice: Choice) -> ChatMessage:
    """Return a choice as a message of the assistant, which a client may send back.

    ``content`` is null if there are calls and no text; reasoning and calls are left out if there are none.
    """
    found: ChatMessage = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
    if choice.reasoning:
        found["reasoning_content"] = choice.reasoning
    if choice.calls:
        found["tool_calls"] = [_call(call) for call in choice.calls]
    return found


def _call(call: ReplyCall) -> FunctionCall | CustomCall:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    """Encode a piece of a call. Clients join the strings under one index, so only the first delta has id and name."""
    kind, argument = ("custom", "input") if call.custom else ("function", "arguments")
    if call.name is None:
        return {"index": call.index, kind: {argument: call.arguments}}
    called = {"name": call.name, argument: call.arguments}
    return {"index": call.index, "id": call.id, "type": kind, kind: called}


def _text_choice(request: ValidRequest, choice: Choice, style: Style) -> TextChoice:
    return {
        "index": _index(request, choice.index, style),
        "text": choice.text,
        "logprobs": text_logprobs(request, choice.logprobs),
        "finish_reason": finish_reason(choice.finish_reason),
    }


def _embeddings(request: ValidRequest, whole: Reply, style: Style) -> dict[str, Any]:
    found: dict[str, Any] = {"id": "embd-" + request.request_id} if style.embedding_id else {}
    data = [
        {"object": "embedding", "index": i, "embedding": _vector(request, vector)}
        for i, vector in enumerate(whole.vectors)
    ]
    return {
        **found,
        "object": "list",
        "data": data,
        "model": model_name(request),
        "usage": usage(request, whole.usage, style),
    }


def _vector(request: ValidRequest, data: bytes) -> str | list[float]:
    if request.encoding_format == "base64":
        return base64.b64encode(data).decode()
    return array("f", data).tolist()


def _index(request: ValidRequest, index: int, style: Style) -> int:
    return index // request.n if style.index_by_prompt and request.index_by_prompt else index


def finish_reason(reason: ReplyFinish) -> Finish:
    """Return the API's word for ``reason``. It has none for an aborted choice: "stop" would mean a complete text."""
    return "length" if reason == "abort" else reason


def chat_logprobs(request: ValidRequest, found: tuple[TextLogprob, ...]) -> ChatLogprobs | None:
    """Return the chat API's ``logprobs``: an entry per token with its alternatives, or None if not asked for."""
    if request.sampling is None or request.sampling.logprobs is None:
        return None
    content: list[ScoredToken] = [
        {**_chat_logprob(entry), "top_logprobs": [_chat_logprob(top) for top in entry.top]} for entry in found
    ]
    return {"content": content, "refusal": None}


def _chat_logprob(entry: TextLogprob) -> AlternativeToken:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def text_logprobs(request: ValidRequest, found: tuple[TextLogprob, ...]) -> TextLogprobs | None:
    """Return the completions API's ``logprobs``, which are parallel lists, or None if not asked for."""
    if request.sampling is None or request.sampling.logprobs is None:
        return None
    return {
        "tokens": [_named(entry) for entry in found],
        "token_logprobs": [entry.logprob for entry in found],
        "top_logprobs": [_top(entry) for entry in found],
        "text_offset": [entry.start for entry in found],
    }


def _named(entry: TextLogprob) -> str:
    """Return the token's text; a part of a character is written as OpenAI does: ``bytes:\\xe6\\x97``."""
    data = bytes(entry.bytes)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode("ascii", "backslashreplace")


def _top(entry: TextLogprob) -> dict[str, float | None] | None:
    """Return log probabilities by text. Two tokens can have the same text (a special token's name and the same words);
    the likelier one, which comes first, is kept."""
    if entry.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for top in entry.top:
        found.setdefault(_named(top), top.logprob)
    found.setdefault(_named(entry), entry.logprob)
    return found


class Stream:
    """The encoder of one streamed chat or completions reply as server-sent events up to ``[DONE]``."""

    __slots__ = (
        "_completion_tokens", "_error_body", "_head", "_held", "_request", "_started", "_style", "_templates",
        "template",
    )  # fmt: skip
    content_type = "text/event-stream; charset=utf-8"
    headers: Mapping[str, str] = {}

    def __init__(
        self, request: ValidRequest, style: Style, error_body: Callable[[ServingError], dict[str, Any]]
    ) -> None:
        self._request = request
        self._style = style
        self._error_body = error_body
        self._head = head(request, streamed=True)
        self._started: set[int] = set()
        self._templates: dict[int, TextTemplate] = {}  # by choice, for deltas that are only text
        self.template: TextTemplate | None = None  # that of the only choice
        self._held: dict[str, Any] | None = None  # the last chunk with choices, until its usage is known
        self._completion_tokens = 0  # so far, of all choices

    def encode(self, piece: Piece) -> bytes:
        if isinstance(piece, Delta):
            self._completion_tokens += piece.num_tokens
            if self._is_plain(piece):
                return self._template(piece.index).fill(piece.text)
            if self._request.task != "chat":
                return self._chunk(self._text_delta(piece)) if piece.text or piece.logprobs else b""
            if piece.calls or piece.reasoning:
                return b"".join(self._chunk(delta) for delta in self._parsed_deltas(piece))
            if piece.text or piece.logprobs:
                content = {"content": piece.text} if piece.text or self._request.tools is None else {}
                return self._chunk(self._chat_delta(piece.index, content, piece.logprobs))
            return b""
        if isinstance(piece, Ended):
            return self._chunk(self._ended(piece), last=True)
        if isinstance(piece, Done):
            return self._done(piece)
        return b""

    def waiting(self) -> bytes:
        """Return a chunk without text, the first one with the role. It is no comment: MLflow's clients raise at one."""
        if self._request.task != "chat":
            return self._chunk(self._text_delta(Delta(index=0, text="")))
        content = {"content": ""} if self._request.tools is None else {}
        return self._chunk(self._chat_delta(0, content, ()))

    def _is_plain(self, piece: Delta) -> bool:
        """Return whether the chunk of ``piece`` has only text, and otherwise the same form as the choice's last one."""
        if not piece.text or piece.logprobs or piece.calls or piece.reasoning or self._request.usage_chunks == "all":
            return False
        return piece.index in self._started or self._request.task != "chat"

    def _template(self, index: int) -> TextTemplate:
        found = self._templates.get(index)
        if found is None:
            found = self._templates[index] = TextTemplate(lambda text: self._chunk(self._plain(index, text)))
            self.template = found if len(self._request.sequences) == 1 else None
        return found

    def _plain(self, index: int, text: str) -> dict[str, Any]:
        if self._request.task == "chat":
            return self._chat_delta(index, {"content": text}, ())
        return self._text_delta(Delta(index=index, text=text))

    def error(self, error: ServingError) -> bytes:
        held = b"" if self._held is None else event(self._held)
        return held + event(self._error_body(error)) + DONE

    def _parsed_deltas(self, piece: Delta) -> Iterator[dict[str, Any]]:
        """Yield a delta for each piece of a call: some clients take the first list of calls as it is, and would take
        two pieces of the same call for two calls."""
        said: list[dict[str, Any]] = [{"tool_calls": [_call_delta(call)]} for call in piece.calls]
        if piece.reasoning:
            said.append({"reasoning_content": piece.reasoning})
        if piece.text:
            said.append({"content": piece.text})
        for i, content in enumerate(said):
            yield self._chat_delta(piece.index, content, () if i else piece.logprobs)

    def _chat_delta(self, index: int, content: dict[str, Any], logprobs: tuple[TextLogprob, ...]) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {**self._role(index), **content},
            "logprobs": chat_logprobs(self._request, logprobs),
            "finish_reason": None,
        }

    def _text_delta(self, piece: Delta) -> dict[str, Any]:
        return {
            "index": _index(self._request, piece.index, self._style),
            "text": piece.text,
            "logprobs": text_logprobs(self._request, piece.logprobs),
            "finish_reason": None,
        }

    def _ended(self, piece: Ended) -> dict[str, Any]:
        reason = finish_reason(piece.finish_reason)
        if self._request.task == "chat":
            role = self._role(piece.index)
            delta = {**role, "content": ""} if role else {}
            return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": reason}
        index = _index(self._request, piece.index, self._style)
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def _role(self, index: int) -> dict[str, Any]:
        if index in self._started:
            return {}
        self._started.add(index)
        return {"role": "assistant"}

    def _chunk(self, choice: dict[str, Any], last: bool = False) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._request.usage_chunks == "all":
            chunk["usage"] = self._usage_so_far()
        elif self._request.usage_chunks == "last":
            chunk["usage"] = None
        elif last and self._style.usage_in_last:
            held, self._held = self._held, chunk
            return b"" if held is None else event(held)
        return event(chunk)

    def _usage_so_far(self) -> dict[str, int]:
        """Return the counts that are known before the end, as vLLM's ``continuous_usage_stats`` has them."""
        prompt, completion = self._request.num_prompt_tokens, self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _done(self, piece: Done) -> bytes:
        counts = usage(self._request, piece.usage, self._style)
        traced = databricks_output(piece.trace)
        if self._request.usage_chunks != "none":
            return event({**self._head, "choices": [], "usage": counts, **traced}) + DONE
        if self._held is not None:
            held, self._held = self._held, None
            return event({**held, "usage": counts, **traced}) + DONE
        return DONE
