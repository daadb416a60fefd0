"""The parser of formats in which calls stand between markers, or without markers at the beginning of a text."""

from __future__ import annotations

import re

from ..interface.request import ToolUse
from .arguments import ArgumentsReader, JsonArguments, KeywordArguments, ParameterArguments, QuotedArguments
from .call_object import CallObject
from .json_values import JsonScanner
from .markers import NO, PARTIAL, Literals, Marker, Search, past_gap, skip_space
from .parser_base import Reading
from .parts import Part

MAX_NAME = 256
_NAME = re.compile(r"[\w.\-/]*")


class MarkedReader(Reading):
    """A parser of texts with marked calls.

    ``_mark`` is the beginning of the text that is held until it is known to be a call; if it is none, it becomes text.
    """

    def __init__(
        self, literals: Literals, tools: ToolUse | None, in_reasoning: bool = False, show_special: bool = False
    ) -> None:
        super().__init__(literals, tools, in_reasoning, show_special)
        format = literals.format
        self._format = format
        self._mark: int | None = None
        self._in_array = False
        self._name = ""
        self._object: CallObject | None = None
        self._rest: JsonScanner | None = None  # scans the rest of a call's object after its arguments
        self._reads_calls = tools is not None
        calls = {} if tools is None else {f"region{i}": each for i, each in enumerate(literals.begins)}
        if tools is not None and (format.begin_optional or not format.begin):
            calls["call"] = literals.call_begin
        self._call_end = self._end_marker()
        self._in_content = Search({"reasoning": literals.reasoning_begin, **calls, **self._strays()})
        ends = calls if format.calls_in_reasoning else {}
        self._in_thought = Search({"end": literals.reasoning_end, **ends})
        self._state = self._reasoning if in_reasoning else self._begin

    def flush(self, cut: bool) -> list[Part]:
        """See ``Parser``."""
        self._final = not cut
        self._read()
        if self.is_complete:
            return self._parts.take()
        if self._reader is not None and self._early is None:
            self._finish_arguments(self._reader, cut)
        elif cut and self._only_calls:
            pass  # the beginning of a call or of its marker
        elif self._mark is not None:
            if not cut or self._is_unmarked(self._mark):
                self._say(self._text[self._mark :])
        elif not cut or self._state in (self._begin, self._content_state, self._reasoning):
            self._say(self._text[self._at :])
        self._say_rest()
        return self._parts.take()

    def _is_unmarked(self, mark: int) -> bool:
        """Return whether the text held from ``mark`` on has begun without a marker."""
        firsts = {marker.first for marker in (*self._literals.begins, self._literals.call_begin) if marker}
        return self._format.is_bare and not self.num_calls and self._text[mark : mark + 1] not in firsts

    def _compact(self) -> None:
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:]
        self._at -= kept
        self._mark = None if self._mark is None else 0

    def _end_marker(self) -> Marker:
        """Return the marker that ends a call after its arguments.

        The readers of keywords and parameters have already read a part of it, or all of it.
        """
        if self._format.arguments == "parameters":
            return Marker("")
        if self._format.arguments == "keywords":
            return Marker(self._literals.encode(self._format.call_end).lstrip().removeprefix(")"))
        return self._literals.call_end

    def _strays(self) -> dict[str, Marker]:
        """Return the end markers that models may repeat after a call, except those that occur in ordinary text."""
        if not self._reads_calls:
            return {}
        ends = {"end": self._literals.end, "call_end": self._call_end}
        if self._format.calls_in_reasoning:
            ends["reasoning_end"] = self._literals.reasoning_end
        return {f"stray {kind}": end for kind, end in ends.items() if end.first != "`"}

    # -- text and reasoning

    def _begin(self) -> bool:
        """Read the beginning of the reply's text; only here are calls without markers recognised."""
        if not (self._reads_calls and self._format.is_bare):
            return self._enter(self._content_state)
        start = skip_space(self._text, self._at)
        self._say(self._text[self._at : start])
        self._at = start
        if start == len(self._text):
            return False
        char = self._text[start]
        opens = "[" if self._format.array else "{" if self._format.layout == "object" else ""
        if char == opens or (not opens and _NAME.match(char).end()):  # type: ignore[union-attr]
            self._mark = start
            return self._enter(self._region)
        return self._enter(self._content_state)

    def _content_state(self) -> bool:
        start, kind, end = self._say_up_to(self._in_content)
        if not kind:
            return False
        if kind == "reasoning":
            return self._begin_reasoning(start, end)
        if kind.startswith("stray"):
            if self.num_calls:
                self._at_marker()
            else:
                self._say(self._text[start:end])
            self._at = end
            return True
        return self._begin_marked(kind, start, end)

    def _begin_marked(self, kind: str, start: int, end: int) -> bool:
        self._mark, self._at = start, end
        self._in_array = False
        return self._enter(self._call_name if kind == "call" else self._region)

    def _begin_reasoning(self, start: int, end: int) -> bool:
        self._at = end
        if self._content.is_begun and not self._literals.is_special(self._literals.reasoning_begin):
            self._say(self._text[start:end])  # the text mentions the marker
            return True
        self._at_marker()
        self.in_reasoning = True
        return self._enter(self._reasoning)

    def _reasoning(self) -> bool:
        start, kind, end = self._say_up_to(self._in_thought)
        if not kind:
            return False
        if kind != "end":
            return self._begin_marked(kind, start, end)
        self._at = end
        self._at_marker()
        self.in_reasoning = False
        return self._enter(self._begin)

    def _fail(self) -> bool:
        """Give out the held text as text, because it is not a call."""
        assert self._mark is not None
        held = self._text[self._mark : self._at]
        self._mark = self._reader = self._object = self._early = None
        self._in_array = False
        self._say(held)
        return self._enter(self._reasoning if self.in_reasoning else self._content_state)

    # -- the beginning of a call

    def _region(self) -> bool:
        """Read the place in a region, or in its list, where a call may begin."""
        text = self._text
        start = past_gap(text, self._at)
        if start < 0:
            return start == NO and self._fail()
        char = text[start]
        if self._format.array and not self._in_array and char == "[":
            self._in_array = True
            self._at = start + 1
            return True
        if self._in_array and char == "]":
            return self._leave_array(start + 1)
        if self._literals.end and (end := self._literals.end.match(text, start)) != NO:
            return self._leave_region(end)
        if self._format.layout == "object":
            if char != "{":
                return self._fail()
            self._at = start
            self._object = CallObject(self._format, self._names)
            return self._enter(self._call_object)
        end = self._literals.call_begin.match(text, start)
        if end == NO:
            return self._fail()
        if end == PARTIAL:
            return False
        self._at = end
        return self._enter(self._call_name)

    def _call_name(self) -> bool:
        start = past_gap(self._text, self._at)
        if start < 0:
            return start == NO and self._fail()
        found = _NAME.match(self._text, start)
        assert found is not None
        if found.end() == len(self._text) and len(found[0]) <= MAX_NAME:
            return False
        self._at = found.end()
        self._name = found[0]
        return self._enter(self._behind_name) if self._name in self._names else self._fail()

    def _behind_name(self) -> bool:
        """Read an id and the marker before the arguments."""
        literals, text = self._literals, self._text
        start = past_gap(text, self._at)
        if start < 0:
            return start == NO and self._fail()
        if literals.id_begin and (end := literals.id_begin.match(text, start)) != NO:
            if end == PARTIAL:
                return False
            self._at = end
            return self._enter(self._call_id)
        return self._end_name(start)

    def _call_id(self) -> bool:
        found = Search({"end": self._literals.name_end}).find(self._text, self._at)
        if found[0] - self._at > MAX_NAME:
            return self._fail()
        return self._end_name(found[0]) if found[1] else False

    def _end_name(self, start: int) -> bool:
        literals, text = self._literals, self._text
        end = literals.name_end.match(text, start)
        if end == NO and self._format.arguments == "parameters":
            ends = literals.call_end.match(text, start), literals.parameter_begin.match(text, start)
            end = start if max(ends) >= 0 else PARTIAL if PARTIAL in ends else NO
        elif end == NO and self._format.arguments == "json" and text[start] == "{":
            end = start
        if end == PARTIAL:
            return False
        if end == NO:
            return self._fail()
        self._at = end
        return self._begin_arguments(self._new_reader())

    def _new_reader(self) -> ArgumentsReader:
        if self._format.arguments == "parameters":
            return ParameterArguments(self._say_arguments, self._literals, self._tools.types.get(self._name, {}))
        if self._format.arguments == "keywords":
            return KeywordArguments(self._say_arguments)
        return JsonArguments(self._say_arguments)

    def _call_object(self) -> bool:
        call = self._object
        assert call is not None
        self._at = call.push(self._text, self._at)
        if call.status == "open":
            return False
        if call.status == "failed":
            return self._fail()
        assert call.name is not None
        self._name = call.name
        self._rest = JsonScanner()
        self._rest.scan("{" * call.depth, 0)
        if call.status == "arguments":
            return self._begin_arguments(self._value_reader(self._text[self._at]))
        bare = self._mark is not None and self._text[self._mark] == "{"
        if call.arguments is None and bare and self._format.is_bare:
            return self._fail()  # an object that happens to have a name
        return self._begin_held(call.arguments or "null")

    def _value_reader(self, char: str) -> ArgumentsReader:
        return QuotedArguments(self._say_arguments) if char == '"' else JsonArguments(self._say_arguments)

    def _begin_held(self, arguments: str) -> bool:
        """Give out a call whose arguments are known completely."""
        if arguments == "null":
            arguments = "{}"
        if arguments[0] not in '{"':
            return self._fail()
        reader = self._value_reader(arguments[0])
        self._early = []
        reader.push(arguments, 0, True)
        reader.finish(False)
        self._mark = None
        self._begin_call(self._name)
        self._end_call()
        return self._enter(
            self._behind_object if self._object is not None and self._object.depth else self._behind_call
        )

    # -- arguments, and what follows them

    def _begin_arguments(self, reader: ArgumentsReader) -> bool:
        self._reader = reader
        self._early = []
        return self._enter(self._arguments)

    def _arguments(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._at = reader.push(self._text, self._at, self._final)
        if self._early is not None:
            if not reader.sure:
                return self._no_object() if reader.broken else False
            self._mark = None
            self._begin_call(self._name)
        if reader.done:
            reader.finish(False)
            self._end_call()
            return self._enter(self._behind_object if self._object is not None else self._behind_arguments)
        if reader.broken:
            self._end_call()
            self._in_array, self._object = False, None
            return self._enter(self._content_state)
        return False

    def _no_object(self) -> bool:
        """Read null in place of arguments, which an object may have for a call without arguments."""
        if self._object is None:
            return self._fail()
        if self._text.startswith("null", self._at):
            self._at += len("null")
            return self._begin_held("null")
        return not "null".startswith(self._text[self._at :]) and self._fail()

    def _finish_arguments(self, reader: ArgumentsReader, cut: bool) -> None:
        reader.finish(cut)
        if reader.done:
            self._end_call()
        else:
            self._flush_call()

    def _behind_object(self) -> bool:
        """Read the rest of a call's object."""
        assert self._rest is not None
        self._at = self._rest.scan(self._text, self._at)
        if self._rest.done or self._rest.broken:
            self._object = None
            return self._enter(self._behind_call if self._rest.done else self._content_state)
        return False

    def _behind_arguments(self) -> bool:
        start = past_gap(self._text, self._at)
        end = self._call_end.match(self._text, start) if self._call_end and start >= 0 else start
        if end == PARTIAL and not self._final:
            return False
        if end >= 0 and self._call_end:
            self._at = end
        return self._enter(self._behind_call)

    def _behind_call(self) -> bool:
        """Read what follows a call: another call, the end of the region, or text."""
        text, literals = self._text, self._literals
        start = past_gap(text, self._at)
        if start == PARTIAL:
            return False
        char = text[start] if start >= 0 else ""
        if self._in_array and char == "]":
            return self._leave_array(start + 1)
        markers = (literals.end, literals.call_begin)
        results = [marker.match(text, start) if marker and char else NO for marker in markers]
        if results[0] >= 0:
            return self._leave_region(results[0])
        if PARTIAL in results and not self._final:
            return False
        if char and char in ",;" and (self._in_array or literals.separator.first == char):
            self._mark, self._at = start, start + 1
            return self._enter(self._region)
        if results[1] >= 0 or (char == "{" and self._format.layout == "object"):
            self._mark = self._at = start
            return self._enter(self._region)
        self._in_array = False
        return self._enter(self._content_state)

    def _leave_array(self, end: int) -> bool:
        self._at = end
        if self._mark is not None and not self.num_calls and self._is_unmarked(self._mark):
            return self._fail()  # an empty list
        self._in_array = False
        self._mark = None
        self._at_marker()
        return self._enter(self._behind_call)

    def _leave_region(self, end: int) -> bool:
        if end == PARTIAL:
            return False
        self._mark = None
        self._at = end
        self._at_marker()
        return self._enter(self._reasoning if self.in_reasoning else self._content_state)
