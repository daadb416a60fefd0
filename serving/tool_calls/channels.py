"""The parser of OpenAI's harmony format: a text is a sequence of messages, and each message has a header that names its
channel and its recipient.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{…}<|call|>``; a prompt ends with ``<|start|>assistant``. The recipient may also stand
before the channel (https://github.com/openai/harmony, docs/format.md).
"""

from __future__ import annotations

import re

from ..interface.request import ToolUse
from .arguments import JsonArguments
from .markers import PARTIAL, SPACE, Literals, Marker, Search, skip_space
from .parser_base import Reading
from .parts import Part

TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
MAX_HEADER = 1024  # characters; anything longer is text
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-/]+)")
_OPENS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=")


class ChannelReader(Reading):
    """A parser of harmony: analysis is reasoning, a message to a known function is a call, everything else is text."""

    def __init__(
        self, literals: Literals, tools: ToolUse | None, in_reasoning: bool = False, show_special: bool = False
    ) -> None:
        super().__init__(literals, tools, in_reasoning, show_special)
        encoded = {token: literals.encode(token) for token in TOKENS}
        self._start, self._channel = encoded["<|start|>"], encoded["<|channel|>"]
        self._tokens = Search({token: Marker(text) for token, text in encoded.items()})
        ends = {token: Marker(encoded[token]) for token in ("<|start|>", "<|end|>", "<|call|>", "<|return|>")}
        self._ends = Search(ends)
        self._opens = tuple(Marker(literals.encode(each)) for each in _OPENS)
        self._state = self._body if in_reasoning else self._begin

    def flush(self, cut: bool) -> list[Part]:
        """See ``Parser``."""
        only_calls = cut and self._only_calls
        self._final = not only_calls
        self._read()
        if self.is_complete:
            return self._parts.take()
        if self._reader is not None:
            self._flush_call()
        elif self._state == self._header and not cut:
            self._end_header(len(self._text))
        elif self._state != self._header and not only_calls:
            self._say(self._text[self._at :])
        self._say_rest()
        return self._parts.take()

    def _begin(self) -> bool:
        """Read the beginning of a message; a text without a header is accepted too."""
        start = skip_space(self._text, self._at)
        self._say(self._text[self._at : start])
        self._at = start
        if start == len(self._text):
            return False
        ends = [marker.match(self._text, start) for marker in self._opens]
        if max(ends) < 0 and PARTIAL in ends and not self._final:
            return False
        return self._enter(self._header if max(ends) >= 0 else self._body)

    def _header(self) -> bool:
        """Read a header up to its message, or up to the token that ends a header without a message."""
        start, kind, end = self._tokens.find(self._text, self._at)
        while kind in ("<|channel|>", "<|constrain|>") or (kind == "<|start|>" and start == self._at):
            start, kind, end = self._tokens.find(self._text, end)
        if start - self._at > MAX_HEADER:
            return self._end_header(self._at + MAX_HEADER)
        if not kind:
            return False
        if kind != "<|message|>":
            return self._end_header(start)
        header = self._text[self._at : start]
        self._at = end
        return self._begin_message(header)

    def _end_header(self, end: int) -> bool:
        """End a header that has no message: the text after its channel token is text of the reply."""
        self._at_marker()
        self.in_reasoning = False
        header = self._text[self._at : end].removeprefix(self._start)
        self._say(header.rpartition(self._channel)[2])
        self._at = end
        return self._enter(self._body)

    def _begin_message(self, header: str) -> bool:
        self._at_marker()
        self.in_reasoning = False
        recipients = _RECIPIENT.findall(header)
        if recipients and recipients[-1] in self._names:
            self._name = recipients[-1]
            self._early = []
            self._reader = JsonArguments(self._say_arguments)
            return self._enter(self._arguments)
        channel = header.rpartition(self._channel)[2].strip(SPACE)
        self.in_reasoning = channel.startswith("analysis") and not recipients
        return self._enter(self._body)

    def _body(self) -> bool:
        start, kind, end = self._say_up_to(self._ends)
        if not kind:
            return False
        self._at_marker()
        self.in_reasoning = False
        self._at = start if kind == "<|start|>" else end
        return self._enter(self._header if kind == "<|start|>" else self._begin)

    def _arguments(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._at = reader.push(self._text, self._at, self._final)
        if self._early is not None:
            if not reader.sure:
                return reader.broken and self._no_call()
            self._begin_call(self._name)
        if reader.done or reader.broken:
            self._end_call()
            return self._enter(self._body)
        return False

    def _no_call(self) -> bool:
        self._reader = self._early = None
        return self._enter(self._body)
