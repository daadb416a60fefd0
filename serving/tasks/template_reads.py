"""What a chat template reads of a request: what it does not read would be ignored, and is refused instead."""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class _Generation(Extension):
    """transformers' ``{% generation %}``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateReads:
    """``variables`` are the names that ``source`` takes from outside, None where it cannot be told."""

    def __init__(self, source: str) -> None:
        self.tool_calls = "tool_calls" in source
        self.variables: frozenset[str] | None = None
        environment: Any = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
        try:
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError:  # rendering will say what is wrong with it, or it has tags of its own
            return
