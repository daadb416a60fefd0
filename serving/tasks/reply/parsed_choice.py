"""The text of a choice that may contain reasoning and tool calls, which are parsed out of it token by token.

Stop strings are matched before parsing, on everything that the model writes except special tokens. They therefore also
match in reasoning and in arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import msgspec

from ...interface.reply import CallDelta, Delta, Piece, ReplyFinish
from ...interface.request import ValidRequest
from ...tool_calls.parser import Parser, call_id, make_parser
from ...tool_calls.parts import CallArguments, CallBegin, Part, Text, Thought
from ..prompt.detokenize import Detokenizer
from ..prompt.text import TextModel
from .choice import ChoiceText
from .stops import Match

_CALLED = Match("", 0, 0)  # stands for the end of a text after its only call, which no stop string has ended


class MarkedDetokenizer:
    """A detokenizer that returns a stand-in character for some special tokens, without waiting for later tokens."""

    __slots__ = ("_by_id", "_inner")

    def __init__(self, inner: Detokenizer, by_id: Mapping[int, str]) -> None:
        self._inner = inner
        self._by_id = by_id

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        char = self._by_id.get(token_id)
        return self._inner.push(token_id) if char is None else self._inner.flush() + char

    def ahead(self, token_id: int) -> int:
        """See ``Detokenizer``."""
        return 0 if token_id in self._by_id else self._inner.ahead(token_id)

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._inner.flush()


class ParsedChoice(ChoiceText):
    """A ``ChoiceText`` whose text is parsed for reasoning and tool calls.

    Each token is counted once: in the first delta of the output that it made certain, or in an empty delta. A token
    counts as reasoning if the parser is in reasoning before or after it, so the tokens of the markers count too.
    """

    def __init__(self, request: ValidRequest, index: int, text: TextModel) -> None:
        reading = text.reading(request.read_as)
        self._by_id = reading.by_id
        self._parts: list[Part] = []
        self._num_calls = 0
        self._custom = False  # whether the last call is a call of a custom tool
        self._parser: Parser = make_parser(
            reading.format,
            request.tools,
            in_reasoning=request.begins_in_reasoning,
            specials=reading.stand_ins,
            show_special=not request.skip_special_tokens,
        )
        super().__init__(request, index, text)
        list(self._spread())  # drop the deltas that an earlier attempt has delivered

    def end(self, reason: ReplyFinish) -> Iterator[Piece]:
        """See ``ChoiceText``."""
        self._parse(self._rest())
        if self.matched is None:
            self._parts += self._parser.flush(cut=reason != "stop")
        counted = self._delta("", (), final=True)
        yield from self._spread(counted if counted.logprobs else None)
        yield from self._ended_by(reason)

    def _new_detokenizer(self) -> Detokenizer:
        return MarkedDetokenizer(super()._new_detokenizer(), self._by_id)

    def _feed(self, token_id: int, count: int) -> str:
        """Return "": the text that the token makes certain goes through the parser."""
        before = self._parser.in_reasoning
        self._parse(super()._feed(token_id, count))
        self.num_reasoning_tokens += before or self._parser.in_reasoning
        if self._parser.is_complete and self.matched is None:
            self.matched = _CALLED
        return ""

    def _parse(self, text: str) -> None:
        if text:
            self._parts += self._parser.push(text)

    def _trim(self, match: Match) -> str:
        if match is not _CALLED:
            self._parse(super()._trim(match))
            self._parts += self._parser.flush(cut=True)
        return ""

    def _ended(self, reason: ReplyFinish, stop_reason: str | int | None) -> Iterator[Piece]:
        tools = self._request.tools
        by_stop_string = self.matched is not None and self.matched is not _CALLED
        if reason == "stop" and self._num_calls and not by_stop_string and not (tools and tools.choice.named):
            reason = "tool_calls"
        return super()._ended(reason, None if self.matched is _CALLED else stop_reason)

    def _deltas(self, text: str, token_ids: tuple[int, ...], scores: tuple[float, ...]) -> Iterator[Delta]:
        return self._spread(self._delta(text, token_ids, scores))

    def _spread(self, counted: Delta | None = None) -> Iterator[Delta]:
        """Yield the deltas of the parsed parts: one for each text or thought, and one for each run of call parts.

        The first of them also carries the token counts and log probabilities of ``counted``.
        """
        parts, self._parts = self._parts, []
        for is_call, run in groupby(parts, key=lambda part: not isinstance(part, Text | Thought)):
            for delta in self._called(run) if is_call else map(self._said, run):
                yield delta if counted is None else _with(counted, delta)
                counted = None
        if counted is not None:
            yield counted

    def _said(self, part: Part) -> Delta:
        if isinstance(part, Thought):
            return Delta(index=self._index, text="", reasoning=part.text)
        return Delta(index=self._index, text=part.text if isinstance(part, Text) else "")

    def _called(self, parts: Iterable[Part]) -> Iterator[Delta]:
        calls = [call for part in parts if (call := self._call(part)) is not None]
        if calls:
            yield Delta(index=self._index, text="", calls=tuple(calls))

    def _call(self, part: Part) -> CallDelta | None:
        custom = self._request.tools.custom if self._request.tools is not None else ()
        if isinstance(part, CallBegin):
            self._num_calls += 1
            self._custom = part.name in custom
            number = self._num_calls - 1
            id = call_id(self._request.request_id, self._index, number)
            return CallDelta(index=number, id=id, name=part.name, custom=self._custom)
        if isinstance(part, CallArguments):
            return CallDelta(index=self._num_calls - 1, arguments=part.text, custom=self._custom)
        return None


def _with(counted: Delta, delta: Delta) -> Delta:
    return msgspec.structs.replace(counted, text=delta.text, reasoning=delta.reasoning, calls=delta.calls)
