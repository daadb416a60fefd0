"""The text of one choice, made as its tokens arrive: it detokenises them, matches and trims stop strings and stop
sequences, and counts tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from ...interface.events import Logits, PromptScored, TokenLogprob, Tokens
from ...interface.reply import Delta, Ended, LogitRows, Piece, ReplyFinish, TextLogprob
from ...interface.request import Sampling, ValidRequest
from ...interface.stop_rule import StopRule
from ..prompt.detokenize import Detokenizer, starts
from ..prompt.text import TextModel
from .stops import Match, SequenceStops, StopMatcher


class ChoiceText:
    """The state of one choice's text.

    ``num_tokens`` counts the tokens up to and including the one that ended the text, ``num_reasoning_tokens`` those of
    them that are reasoning. ``matched`` is the match of the stop string or of the stop sequence's text.

    A token's log probabilities are sent with the first character of its text. The reply has none for tokens whose text
    was trimmed away with a stop string, and none for the end-of-text token.
    """

    __slots__ = (
        "_detokenizer", "_echo", "_ending_token", "_index", "_is_plain", "_is_stop", "_may_match", "_no_stops",
        "_pushed", "_request", "_rows", "_sampling", "_sequences", "_stop_ids", "_stops", "_text", "_waiting",
        "matched", "num_reasoning_tokens", "num_tokens",
    )  # fmt: skip

    def __init__(self, request: ValidRequest, index: int, text: TextModel) -> None:
        assert request.sampling is not None
        self._request = request
        self._sampling: Sampling = request.sampling
        self._index = index
        self._text = text
        self._detokenizer = self._new_detokenizer()
        self._echo = self._echoed()
        self._stops = StopMatcher(request.stop)
        self._no_stops = not request.stop
        sequences = self._sampling.stop_sequences
        self._sequences = SequenceStops(sequences) if sequences else None
        rule = StopRule(request.sampling)
        self._stop_ids, self._is_stop, self._may_match = rule.stop_ids, rule.is_stop, rule.may_match
        self._pushed = 0  # characters given to the matcher
        self._waiting: deque[tuple[int, TextLogprob]] = deque()  # (where its text starts, log probability)
        self._ending_token: int | None = None
        self._rows: deque[Logits] = deque()  # rows of tokens that have not arrived yet
        self._is_plain = type(self) is ChoiceText and not request.stop and self._sequences is None
        self.matched: Match | None = None
        self.num_reasoning_tokens = 0
        self.num_tokens = self._resume()

    def _new_detokenizer(self) -> Detokenizer:
        # A grammar counts a leading space, so a text that follows it from the beginning keeps that space. A text with
        # tools may be ordinary text, which begins as any other does.
        is_grammar = self._sampling.grammar is not None and self._request.tools is None
        before = self._request.sequences[self._index].prompt_token_ids if self._request.continues_prompt else ()
        return self._text.detokenizer(self._request.skip_special_tokens, keeps_space=is_grammar, before=before)

    def _resume(self) -> int:
        """Feed the tokens that an earlier attempt delivered, and return their number.

        They set the state and are counted, but are not sent again.
        """
        resumed = self._request.sequences[self._index].resumed_token_ids
        for count, token_id in enumerate(resumed, 1):
            self._feed(token_id, count)
        return len(resumed)

    def begin(self) -> Iterator[Piece]:
        """Yield the echoed prompt, unless it has to wait for its log probabilities."""
        if self._echo and self._sampling.prompt_logprobs is None:
            yield Delta(index=self._index, text=self._echo)

    def _echoed(self) -> str:
        """Return the prompt's text for ``echo``, without the beginning of a character, with which the text begins."""
        echo = self._prompt_text
        return echo.removesuffix(self._new_detokenizer().flush()) if echo else ""

    @property
    def _prompt_text(self) -> str:
        request = self._request
        return request.echo[self._index // request.n] if request.echo else ""

    def scored(self, event: PromptScored) -> Iterator[Piece]:
        """Yield the echoed prompt with its log probabilities; the first token has none."""
        token_ids = self._request.sequences[self._index].prompt_token_ids
        begun, length = starts(self._text.detokenizer(skip_special_tokens=False), token_ids)
        # The tokens end where the text ends; the token that the tokenizer put before it (BOS) is not in the text.
        shift = len(self._prompt_text) - length
        entries = (self._logprob(token_ids[0], None), *map(self._scored, event.logprobs))
        placed = [_at(max(0, place + shift), entry) for place, entry in zip(begun, entries, strict=True)]
        yield Delta(index=self._index, text=self._echo, logprobs=tuple(placed))

    def read(self, event: Tokens) -> str | None:
        """Return the same text as ``push`` for an event that has only text; the fast path for plain requests.

        Return None, and change nothing, if the event needs ``push``.
        """
        if not self._is_plain or event.logprobs or self._rows:
            return None
        text, count = "", self.num_tokens
        for token_id in event.token_ids:
            count += 1
            if token_id in self._stop_ids and self._is_stop(token_id, count):
                self._ending_token = token_id
                if not self._request.include_stop_str_in_output:
                    continue
            text += self._detokenizer.push(token_id)
        self.num_tokens = count
        self._pushed += len(text)
        return text

    def push(self, event: Tokens) -> Iterator[Piece]:
        """Yield the pieces of the event's tokens, each counted once, and ``Ended`` if a stop string is complete."""
        parts: list[str] = []
        taken: list[int] = []
        for position, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            taken.append(token_id)
            if event.logprobs and not self._is_stop(token_id, self.num_tokens):
                start = self._pushed + self._detokenizer.ahead(token_id)
                scored = _at(len(self._echo) + start, self._scored(event.logprobs[position]))
                self._waiting.append((start, scored))
            parts.append(self._feed(token_id, self.num_tokens))
            if self.matched is not None:
                break
        text = "".join(parts)
        if self.matched is not None:
            text += self._trim(self.matched)
        if self._rows:
            yield from self._rows_of(len(taken))
        scores = tuple(entry.logprob for entry in event.logprobs[: len(taken)]) if event.logprobs else ()
        yield from self._deltas(text, tuple(taken), scores)
        if self.matched is not None:
            yield from self._ended("stop", self.matched.stop)

    def logits(self, event: Logits) -> Iterator[Piece]:
        """Yield logits of the context at once; hold those of generated tokens until the tokens join the text."""
        if event.of == "generation":
            self._rows.append(event)
        else:
            yield LogitRows(index=self._index, of=event.of, num_rows=event.num_rows, data=event.data)

    def _rows_of(self, num_tokens: int) -> Iterator[LogitRows]:
        """Yield the waiting rows of the next ``num_tokens`` tokens."""
        while num_tokens and self._rows:
            event = self._rows.popleft()
            count = min(num_tokens, event.num_rows)
            num_tokens -= count
            cut = len(event.data) // event.num_rows * count
            if count < event.num_rows:
                rest = event.num_rows - count
                self._rows.appendleft(
                    msgspec.structs.replace(event, start=event.start + count, num_rows=rest, data=event.data[cut:])
                )
            yield LogitRows(index=self._index, of=event.of, num_rows=count, data=event.data[:cut])

    def end(self, reason: ReplyFinish) -> Iterator[Piece]:
        """Yield the text still held, and ``Ended``: with the engine's reason unless a stop string matched."""
        text = self._rest()
        delta = self._delta(text, (), final=True)
        if delta.text or delta.logprobs:
            yield delta
        yield from self._ended_by(reason)

    def _rest(self) -> str:
        """Return the text still held, after matching stop strings; sets ``matched``."""
        rest = self._detokenizer.flush()
        self._pushed += len(rest)
        text, self.matched = self._stops.push(rest, self._may_match(self.num_tokens))
        if self._sequences is not None:
            text = self._sequences.flush(text)
        return text + (self._stops.flush() if self.matched is None else self._trim(self.matched))

    def _ended_by(self, reason: ReplyFinish) -> Iterator[Piece]:
        if self.matched is not None:
            return self._ended("stop", self.matched.stop)
        return self._ended(reason, self._stop_token())

    def _feed(self, token_id: int, count: int) -> str:
        """Return the text that ``token_id`` makes certain, after matching stop strings and stop sequences.

        Sets ``matched``.
        """
        sequences = self._sequences
        if sequences is not None:
            sequences.feed(token_id, self._pushed + self._detokenizer.ahead(token_id))
        if self._is_stop(token_id, count):
            self._ending_token = token_id
            if not self._request.include_stop_str_in_output:
                return "" if sequences is None else self._cut(sequences, "", count)
        new = self._detokenizer.push(token_id)
        self._pushed += len(new)
        free, self.matched = self._stops.push(new, self._no_stops or self._may_match(count))
        return free if sequences is None else self._cut(sequences, free, count)

    def _cut(self, sequences: SequenceStops, free: str, count: int) -> str:
        """Return the part of ``free`` that can be sent when stop sequences may end the text.

        A stop string that is complete with the same token or an earlier one takes precedence.
        """
        start = sequences.start if self._may_match(count) else None
        if self.matched is not None:
            return sequences.flush(free)
        if start is None:
            return sequences.push(free)
        free = sequences.flush(free + self._stops.flush() + self._detokenizer.flush(), start)
        found = sequences.rest()
        self.matched = Match(found, start, start + len(found))
        return free

    def _trim(self, match: Match) -> str:
        """Return the part of a match that belongs to the text; drop log probabilities after the cut."""
        kept = self._request.include_stop_str_in_output
        cut = match.end if kept else match.start
        while self._waiting and self._waiting[-1][0] >= cut:
            self._waiting.pop()
        return match.stop if kept else ""

    def _deltas(self, text: str, token_ids: tuple[int, ...], scores: tuple[float, ...]) -> Iterator[Delta]:
        yield self._delta(text, token_ids, scores)

    def _delta(
        self, text: str, token_ids: tuple[int, ...], scores: tuple[float, ...] = (), final: bool = False
    ) -> Delta:
        logprobs = self._released(final) if self._waiting else ()
        return Delta(
            index=self._index,
            text=text,
            num_tokens=len(token_ids),
            token_ids=token_ids,
            logprobs=logprobs,
            token_logprobs=scores,
        )

    @property
    def _position(self) -> int:
        """How many characters of the text have been released."""
        return self._stops.position if self._sequences is None else self._sequences.position

    def _released(self, final: bool) -> tuple[TextLogprob, ...]:
        """Remove and return the log probabilities of the text that has been released, or all of them if ``final``."""
        ready = []
        released = self._pushed if self.matched is not None else self._position
        while self._waiting and (final or self._waiting[0][0] < released):
            ready.append(self._waiting.popleft()[1])
        return tuple(ready)

    def _ended(self, reason: ReplyFinish, stop_reason: str | int | None) -> Iterator[Piece]:
        if self._request.suffix:
            yield Delta(index=self._index, text=self._request.suffix)
        # the model has answered only a part of the truncated prompt, which "length" tells the caller
        reason = "length" if self._request.truncated and reason in ("stop", "tool_calls") else reason
        yield Ended(index=self._index, finish_reason=reason, stop_reason=stop_reason)

    def _stop_token(self) -> int | None:
        """Return the caller's stop token that ended the text; None for the model's end-of-text token."""
        token = self._ending_token
        return None if token is None or token in self._text.eos_token_ids else token

    def _scored(self, entry: TokenLogprob) -> TextLogprob:
        top = tuple(self._logprob(token_id, logprob) for token_id, logprob in entry.top)
        return self._logprob(entry.token_id, entry.logprob, top)

    def _logprob(self, token_id: int, logprob: float | None, top: tuple[TextLogprob, ...] = ()) -> TextLogprob:
        data = self._text.token_bytes(token_id)
        return TextLogprob(
            token=data.decode(errors="replace"), bytes=tuple(data), token_id=token_id, logprob=logprob, top=top
        )


def _at(start: int, entry: TextLogprob) -> TextLogprob:
    return msgspec.structs.replace(entry, start=start)
