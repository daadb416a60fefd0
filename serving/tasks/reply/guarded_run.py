"""Guardrails on a reply: its pieces are masked as they arrive, or a choice ends before the text that is blocked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from ...interface.engine import EventStream
from ...interface.errors import InvalidField
from ...interface.events import Event
from ...interface.guardrails import TextRules
from ...interface.reply import CallDelta, Delta, Ended, Piece
from ...interface.request import ValidRequest
from ..text_filter import TextFilter, filtered, filtered_json
from .pieces import Run

_UNREADABLE = ("logprobs", "prompt_logprobs", "context_logits", "generation_logits")
_NOTHING = "not at this endpoint: its output guardrails could not keep back what they say about a text"


def check_output(request: ValidRequest, rules: TextRules) -> None:
    """Raise ``InvalidField`` if the reply would have numbers from which a text could be read."""
    sampling = request.sampling
    for name in () if rules.is_empty or sampling is None else _UNREADABLE:
        value = getattr(sampling, name)
        if value is not None and value is not False:  # 0 alternatives are log probabilities too
            raise InvalidField(name, value, _NOTHING)


class GuardedRun:
    """A run whose pieces are those of ``run`` as ``rules`` leave them.

    A choice that is blocked ends with ``content_filter``, and its sequence in the engine ends too. Tokens are counted
    by ``run``, so that all that were generated are billed.
    """

    def __init__(self, run: Run, stream: EventStream, rules: TextRules) -> None:
        self._run, self._stream, self._rules = run, stream, rules
        self._guards: dict[int, _Guard] = {}

    @property
    def is_complete(self) -> bool:
        return self._run.is_complete

    def begin(self) -> Iterator[Piece]:
        return self._guarded(self._run.begin())

    def feed(self, event: Event) -> Iterable[Piece]:
        return self._guarded(self._run.feed(event))

    def end(self) -> Iterator[Piece]:
        return self._guarded(self._run.end())

    def _guarded(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if not isinstance(piece, Delta | Ended):
                yield piece
                continue
            guard = self._guards.setdefault(piece.index, _Guard(piece.index, self._rules))
            yield from guard.through(piece, self._stream)


class _Guard:
    """The filter of one choice. Text and reasoning are filtered as they arrive, the arguments of a call when they are
    complete."""

    def __init__(self, index: int, rules: TextRules) -> None:
        self._index, self._rules = index, rules
        self._kind: Literal["text", "reasoning"] | None = None
        self._filter = TextFilter(rules)
        self._call: list[CallDelta] = []
        self._is_blocked = False

    def through(self, piece: Delta | Ended, stream: EventStream) -> Iterator[Piece]:
        """Yield what is left of ``piece``, and the end of the choice if it is blocked, after which nothing follows."""
        if self._is_blocked:
            return
        yield from self._delta(piece) if isinstance(piece, Delta) else self._close()
        if self.is_over():
            stream.finish(self._index)
            yield Ended(index=self._index, finish_reason="content_filter")
        elif isinstance(piece, Ended):
            yield piece

    def is_over(self) -> bool:
        """Return whether the choice was blocked."""
        return self._is_blocked

    def _delta(self, delta: Delta) -> Iterator[Delta]:
        counted = Delta(index=self._index, text="", num_tokens=delta.num_tokens)
        if delta.calls:
            yield from self._calls(delta.calls)
        elif delta.text or delta.reasoning:
            kind: Literal["text", "reasoning"] = "text" if delta.text else "reasoning"
            if kind != self._kind:
                yield from self._close()
                self._kind = kind
            said = "" if self._is_blocked else self._filter.push(delta.text or delta.reasoning)
            self._is_blocked = self._is_blocked or self._filter.blocked is not None
            counted = msgspec.structs.replace(counted, **{kind: said})
        yield counted

    def _calls(self, calls: tuple[CallDelta, ...]) -> Iterator[Delta]:
        if self._kind is not None:
            yield from self._close()
        for call in calls:
            if self._call and call.index != self._call[0].index:
                yield from self._close()
            self._call.append(call)

    def _close(self) -> Iterator[Delta]:
        """Yield what is still held back, at the end of a text, of reasoning or of a call."""
        if self._is_blocked:
            return
        kind, call = self._kind, self._call
        self._kind, self._call = None, []
        if kind is not None:
            said = self._filter.push("", final=True)
            self._is_blocked = self._filter.blocked is not None
            self._filter = TextFilter(self._rules)
            if said:
                yield msgspec.structs.replace(Delta(index=self._index, text=""), **{kind: said})
        if call and (whole := self._filtered(call)) is not None:
            yield Delta(index=self._index, text="", calls=whole)

    def _filtered(self, call: list[CallDelta]) -> tuple[CallDelta, ...] | None:
        """Return a call that is complete, with what is masked in its arguments; None if it is blocked."""
        written = "".join(part.arguments for part in call)
        left, blocked = filtered_arguments(written, self._rules, custom=call[0].custom)
        self._is_blocked = self._is_blocked or blocked is not None
        if self._is_blocked:
            return None
        begun = [part for part in call if part.id is not None or part.name is not None]
        begun = [msgspec.structs.replace(part, arguments="") for part in begun]
        rest = CallDelta(index=call[0].index, arguments=left, custom=call[0].custom)
        return (*begun, rest) if left else tuple(begun)


def filtered_arguments(arguments: str, rules: TextRules, *, custom: bool = False) -> tuple[str, str | None]:
    """Return the arguments of a call as ``rules`` leave them, and the rule that blocks them, or None.

    They are JSON, unless the tool is ``custom`` or they were cut off; arguments without a match stay byte for byte.
    """
    try:
        value = None if custom else msgspec.json.decode(arguments)
        left, blocked = filtered_json(value, rules)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if value is None:
        return filtered(arguments, rules)
    return (arguments if left == value else msgspec.json.encode(left).decode()), blocked
