"""The base of all parsers of a model's text: it gives out text, reasoning and calls, without white space at markers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..interface.request import ToolUse
from ..interface.tool_format import CUSTOM_INPUT
from .arguments import ArgumentsReader
from .json_values import MemberText
from .markers import Literals, Search
from .parts import CallArguments, CallBegin, CallEnd, Part, Parts, Text, Thought, Trimmed

NO_TOOLS = ToolUse(names=())


class Parser(Protocol):
    """A parser that takes a model's text piece by piece; the division into pieces never changes the result.

    ``in_reasoning`` says whether the following text is reasoning, as far as is known. ``num_calls`` is the number of
    calls that have begun. ``is_complete`` is set when a call has ended and no further call is allowed; later text is
    not read.
    """

    in_reasoning: bool
    num_calls: int
    is_complete: bool

    def push(self, text: str) -> list[Part]: ...

    def flush(self, cut: bool) -> list[Part]:
        """Return the remaining parts at the end of the text.

        ``cut`` says that the text ended at its length limit and not where the model ended it. A call that has begun
        stays incomplete. If the text ends within what may be a call but has not begun as one, that text is dropped with
        ``cut``, and is text otherwise. The beginning of a marker is text too, unless only a call could follow.
        """
        ...


class Reading:
    """The state that all parsers share: the text not yet read (``_text`` from ``_at`` on), the parts of the text before
    it, and a state machine.

    A state is a method that reads the text that is certain and returns whether reading goes on, in this state or in the
    one that it has entered.
    """

    _state: Callable[[], bool]

    def __init__(self, literals: Literals, tools: ToolUse | None, in_reasoning: bool, show_special: bool) -> None:
        self._literals = literals
        self._tools = tools or NO_TOOLS
        self._names = frozenset(self._tools.names)
        self._show_special = show_special
        self._text = ""
        self._at = 0
        self._final = False
        self._parts = Parts()
        self._content = Trimmed(after_marker=in_reasoning)
        self._thought = Trimmed(after_marker=True)
        self._custom: MemberText | None = None
        self._reader: ArgumentsReader | None = None
        self._early: list[str] | None = None  # arguments of what may still turn out not to be a call
        self.in_reasoning = in_reasoning
        self.num_calls = 0
        self.is_complete = False

    def push(self, text: str) -> list[Part]:
        """See ``Parser``."""
        if self.is_complete:
            return []
        self._text += text
        self._read()
        self._compact()
        return self._parts.take()

    def _read(self) -> None:
        while not self.is_complete and self._state():
            pass

    @property
    def _only_calls(self) -> bool:
        """Whether nothing but calls may follow: the caller requires one, or this is the rest of a turn of calls."""
        if self.in_reasoning:
            return False
        return self._tools.choice.mode == "required" or (self.num_calls > 0 and not self._literals.format.text_after)

    def _enter(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _compact(self) -> None:
        """Drop the text that has been read."""
        self._text, self._at = self._text[self._at :], 0

    def _say(self, text: str) -> None:
        """Give out ``text`` as text of the reply, or as reasoning while that goes on."""
        shown = self._literals.named(text) if self._show_special else self._literals.without(text)
        if not shown:
            return
        if self.in_reasoning:
            self._parts.add(Thought, self._thought.push(shown))
        else:
            self._parts.add(Text, self._content.push(shown))

    def _say_up_to(self, markers: Search) -> tuple[int, str, int]:
        """Give out the text before the first of ``markers``, and return what ``Search.find`` returned for them."""
        found = markers.find(self._text, self._at)
        self._say(self._text[self._at : found[0]])
        self._at = found[0]
        return found

    def _at_marker(self) -> None:
        """Note that a marker has been read; white space next to it is not text."""
        self._content.at_marker()
        self._thought.at_marker()

    def _say_rest(self) -> None:
        self._parts.add(Thought, self._thought.flush())
        self._parts.add(Text, self._content.flush())

    def _say_arguments(self, text: str) -> None:
        if self._early is not None:
            self._early.append(text)
            return
        text = self._literals.named(text)
        self._parts.add(CallArguments, text if self._custom is None else self._custom.push(text))

    def _begin_call(self, name: str) -> None:
        """Give out the beginning of a call that is now certain, with the arguments known so far."""
        self._at_marker()
        self.in_reasoning = False
        self.num_calls += 1
        self._custom = MemberText(CUSTOM_INPUT) if name in self._tools.custom else None
        self._parts.put(CallBegin(name))
        early, self._early = self._early or [], None
        for text in early:
            self._say_arguments(text)

    def _end_call(self) -> None:
        self._flush_call()
        self._parts.put(CallEnd())
        self._reader = None
        self.is_complete = not self._tools.parallel

    def _flush_call(self) -> None:
        if self._custom is not None:
            self._parts.add(CallArguments, self._custom.flush())
