"""A parser's parts put together again, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from mlflow_llm.serving.tool_calls.parser import make_parser
from mlflow_llm.serving.tool_calls.parts import CallArguments, CallBegin, CallEnd, Text, Thought


@dataclass
class Read:
    """The output of a parser: ``calls`` are [name, arguments, whether it has ended]."""

    text: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)

    def add(self, parts):
        for part in parts:
            if isinstance(part, Text):
                self.text += part.text
            elif isinstance(part, Thought):
                self.reasoning += part.text
            elif isinstance(part, CallBegin):
                self.calls.append([part.name, "", False])
            elif isinstance(part, CallArguments):
                assert part.text
                self.calls[-1][1] += part.text
            else:
                assert isinstance(part, CallEnd)
                self.calls[-1][2] = True


def read(pieces, format, tools=None, cut=False, **options):
    """Push every piece and the end through a parser, and return its output."""
    parser, out = make_parser(format, tools, **options), Read()
    for piece in pieces:
        out.add(parser.push(piece))
    out.add(parser.flush(cut))
    assert parser.num_calls == len(out.calls)
    return out


def split(text, places):
    """Split ``text`` at ``places``."""
    places = sorted({0, *places, len(text)})
    return [text[a:b] for a, b in pairwise(places)]
