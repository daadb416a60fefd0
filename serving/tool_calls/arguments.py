"""Reads the arguments of one call as they arrive and gives them out as JSON.

A reader gets the text from the beginning of the arguments and returns how far it has read. Text that it leaves unread
is not certain yet and is passed again with more text. The reader is ``sure`` once the text can only be arguments,
``done`` at their end, and ``broken`` where they stop being arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from .json_values import JsonScanner, StringDecoder
from .markers import MAX_SPACE, NO, PARTIAL, Literals, Marker, past_gap, skip_space
from .parameter_value import ParameterValue
from .python_values import PythonValue, text_json

Say: TypeAlias = Callable[[str], None]
MAX_KEY = 256  # characters
_NAME = re.compile(r"\w*")
_KEY = re.compile('[^<>\n"\ud800-\udfff]*')


class ArgumentsReader(Protocol):
    """A reader of arguments in one format.

    ``final`` says that no more text follows; ``finish`` is then called once. ``cut`` says that the text has ended at
    its length limit and not by itself.
    """

    sure: bool
    done: bool
    broken: bool

    def push(self, text: str, at: int, final: bool) -> int: ...

    def finish(self, cut: bool) -> None: ...


class JsonArguments:
    """A reader of a JSON object, which gives it out unchanged."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._scanner = JsonScanner()
        self.sure = self.done = self.broken = False

    def push(self, text: str, at: int, final: bool) -> int:
        """See ``ArgumentsReader``."""
        if not self.sure:
            start = past_gap(text, at)
            if start == PARTIAL:
                return at
            self.sure = start >= 0 and text[start] == "{"
            self.broken = not self.sure
            if self.broken:
                return at
            at = start
        end = self._scanner.scan(text, at)
        self._say(text[at:end])
        self.done, self.broken = self._scanner.done, self._scanner.broken
        return end

    def finish(self, cut: bool) -> None:
        """See ``ArgumentsReader``."""


class QuotedArguments:
    """A reader of an object that is written as a JSON string, as some models do, which gives out the string's
    content."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._scanner = JsonScanner()
        self._decoder = StringDecoder()
        self._begun = False
        self.sure = True
        self.done = self.broken = False

    def push(self, text: str, at: int, final: bool) -> int:
        """See ``ArgumentsReader``."""
        end = self._scanner.scan(text, at)
        begin = at if self._begun else at + 1
        self._begun = self._begun or end > at
        self.done, self.broken = self._scanner.done, self._scanner.broken
        self._say(self._decoder.push(text[begin : end - 1 if self.done else end]))
        return end

    def finish(self, cut: bool) -> None:
        """See ``ArgumentsReader``."""
        self._say(self._decoder.flush())


class KeywordArguments:
    """A reader of ``name=value, …`` up to and including the closing parenthesis."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._name = ""
        self._in_name = self._waits = False
        self._value: PythonValue | None = None
        self._names: set[str] = set()
        self.sure = self.done = self.broken = False

    def push(self, text: str, at: int, final: bool) -> int:
        """See ``ArgumentsReader``."""
        self._waits = False
        while not (self.done or self.broken or self._waits):
            if self._value is None:
                at = self._between(text, at)
                continue
            at = self._value.push(text, at)
            self.broken = self._value.broken
            self._waits = not self._value.done
            if self._value.done:
                self._value = None
        return at

    def finish(self, cut: bool) -> None:
        """See ``ArgumentsReader``."""
        if self._value is not None:
            self._value.finish()

    def _between(self, text: str, at: int) -> int:
        if self._in_name:
            found = _NAME.match(text, at)
            assert found is not None
            self._name += found[0]
            self._in_name = self._waits = found.end() == len(text)
            self.broken = len(self._name) > MAX_KEY
            return found.end()
        start = past_gap(text, at)
        if start < 0:
            self._waits, self.broken = start == PARTIAL, start == NO
            return at
        char = text[start]
        if self._name:
            self._begin_value(char)
        elif char == ")":
            self._say("}" if self._names else "{}")
            self.sure = self.done = True
        elif char.isidentifier():
            self._name, self._in_name = char, True
        else:
            self.broken = char != "," or not self._names
        return at if self.broken else start + 1

    def _begin_value(self, char: str) -> None:
        if char != "=" or self._name in self._names:
            self.broken = True
            return
        self._say(f'{", " if self._names else "{"}"{text_json(self._name)}": ')
        self.sure = True
        self._names.add(self._name)
        self._name = ""
        self._value = PythonValue(self._say)


class ParameterArguments:
    """A reader of tagged parameters, up to and including the end of the call.

    An end tag ends a value only if another parameter or the end of the call follows it, because a text may mention
    tags. If the end tag is missing, the value ends at the next parameter, or at an end of the call that only another
    call, the end of the calls or the end of the text follows.
    """

    def __init__(self, say: Say, literals: Literals, types: Mapping[str, tuple[str, ...]]) -> None:
        self._say = say
        self._literals = literals
        self._types = types
        format = literals.format
        self._leads = format.value_end.startswith("\n")  # one line break before the end tag is not part of the value
        self._trails = format.key_end.endswith("\n")  # nor is one line break before its first character
        firsts = {marker.first for marker in (literals.value_end, literals.call_end, literals.parameter_begin)}
        self._first = re.compile("[" + "".join(map(re.escape, sorted(firsts))) + "]")
        self._key: str | None = None
        self._value: ParameterValue | None = None
        self._at_start = self._is_fresh = False  # before a value's leading line break; before its first character
        self._seen: set[str] = set()
        self._waits = False  # whether more text is needed
        self.sure = self.done = self.broken = False

    def push(self, text: str, at: int, final: bool) -> int:
        """See ``ArgumentsReader``."""
        self._waits = False
        while not (self.done or self.broken or self._waits):
            if self._value is not None:
                at = self._in_value(self._value, text, at, final)
            elif self._key is not None:
                at = self._in_key(text, at)
            else:
                at = self._between(text, at)
        return at

    def finish(self, cut: bool) -> None:
        """See ``ArgumentsReader``."""
        if self._value is not None:
            self._value.cut()
        elif self._key is None and not cut and self.sure and not (self.done or self.broken):
            self._say("}" if self._seen else "{}")
            self.done = True

    def _between(self, text: str, at: int) -> int:
        start = past_gap(text, at)
        if start < 0:
            self._waits, self.broken = start == PARTIAL, start == NO
            return at
        begin = self._literals.parameter_begin.match(text, start)
        if begin >= 0:
            self.sure = True
            self._key = ""
            return begin
        end = self._literals.call_end.match(text, start)
        if end >= 0:
            self._say("}" if self._seen else "{}")
            self.sure = self.done = True
            return end
        self.broken = PARTIAL not in (begin, end)
        self._waits = True
        return at

    def _in_key(self, text: str, at: int) -> int:
        assert self._key is not None
        found = _KEY.match(text, at)
        assert found is not None
        self.broken = len(found[0]) > MAX_KEY
        self._waits = found.end() == len(text)
        if self.broken or self._waits:
            return at
        ends = [marker.match(text, found.end()) for marker in self._key_ends()]
        key = found[0].strip()
        for as_json, end in zip((False, True), ends, strict=False):
            if end >= 0 and key:
                self._begin_value(key, as_json)
                return end
        self.broken = PARTIAL not in ends or not key
        self._waits = True
        return at

    def _key_ends(self) -> tuple[Marker, ...]:
        literals = self._literals
        return (literals.key_end, literals.key_end_json) if literals.key_end_json else (literals.key_end,)

    def _begin_value(self, key: str, as_json: bool) -> None:
        self._key = None
        self._at_start, self._is_fresh = self._trails, True
        types = self._types.get(key, ())
        if self._literals.key_end_json:
            types = ("json",) if as_json else ("string",)
        if key in self._seen:
            self._value = ParameterValue(_nothing, types)
            return
        self._say(f'{", " if self._seen else "{"}"{text_json(key)}": ')
        self._seen.add(key)
        self._value = ParameterValue(self._say, types)

    def _in_value(self, value: ParameterValue, text: str, at: int, final: bool) -> int:
        if self._at_start and at < len(text):
            self._at_start = False
            if text[at] == "\n":
                at += 1
        upto, end = self._find_end(text, at, final)
        self._is_fresh = self._is_fresh and upto == at
        read = value.push(text[at:upto])
        if value.broken:
            self.broken = True
            return at + read
        if end == NO:
            self._waits = True
            return upto
        value.end()
        self._value = None
        return end

    def _find_end(self, text: str, at: int, final: bool) -> tuple[int, int]:
        """Return where the certain part of the value ends, and where its end tag ends, or NO for the latter."""
        start = at
        while found := self._first.search(text, at):
            at = found.start()
            lead = at > start and text[at - 1] == "\n"
            end = self._end_at(text, at, final, lead or (at == start and self._is_fresh))
            if end != NO:
                return at - (self._leads and lead), end if end >= 0 else NO
            at += 1
        held = self._leads and not final and text.endswith("\n", start)
        return len(text) - held, NO

    def _end_at(self, text: str, at: int, final: bool, begins_line: bool) -> int:
        """Return where reading goes on if the value ends at ``at``; NO if it does not, PARTIAL if that is not known."""
        literals = self._literals
        results = (
            self._followed(literals.value_end, text, at, final, (literals.parameter_begin, literals.call_end)),
            self._next_parameter(text, at) if begins_line or not self._leads else NO,
            self._call_ended(text, at, final),
        )
        done = [end for end in results if end >= 0]
        if done:
            return done[0]
        return PARTIAL if PARTIAL in results and not final else NO

    def _followed(self, marker: Marker, text: str, at: int, final: bool, by: tuple[Marker, ...]) -> int:
        end = marker.match(text, at)
        if end < 0 or self._literals.is_special(marker):
            return end
        after = skip_space(text, end)
        if after - end > MAX_SPACE:
            return NO
        if after == len(text):
            return end if final else PARTIAL
        follows = [each.match(text, after) for each in by if each]
        if any(each >= 0 for each in follows):
            return end
        return (end if final else PARTIAL) if PARTIAL in follows else NO

    def _next_parameter(self, text: str, at: int) -> int:
        """Return ``at`` if another parameter begins there without an end tag of this one; otherwise PARTIAL or NO."""
        begin = self._literals.parameter_begin.match(text, at)
        if begin < 0:
            return begin
        found = _KEY.match(text, begin)
        assert found is not None
        if found.end() == len(text):
            return PARTIAL if len(found[0]) <= MAX_KEY else NO
        end = max(marker.match(text, found.end()) for marker in self._key_ends())
        return at if end >= 0 and found[0] else (NO if end == NO else PARTIAL)

    def _call_ended(self, text: str, at: int, final: bool) -> int:
        literals = self._literals
        end = self._followed(literals.call_end, text, at, final, (literals.end, literals.call_begin, *literals.begins))
        return at if end >= 0 else end


def _nothing(text: str) -> None:
    """Ignore the value of a key that the model has already written: an object has each key only once."""
