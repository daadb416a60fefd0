"""Grammars for the calls in a reply: forced calls, calls of strict tools, and calls as an alternative to a text with a
grammar of its own.

Calls are written in the model's own format (``formats``), so that the model generates what it was trained to generate.
Special tokens in the markers are tokens in the grammar, so no text can imitate them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..interface.constraint import Constraint, Grammar
from ..interface.request import Tool, ToolChoice
from ..interface.tool_format import CUSTOM_INPUT, ToolFormat
from ..structured.grammar import ended_grammar, grammar_of, quoted_grammar, schema_value
from .forced_arguments import ArgumentsGrammar
from .lark import Lark, one_of, quoted, times

MAX_CALLS = 128
MAX_THOUGHTS = 8  # stretches of reasoning before a reply, in formats with channels
_FINAL, _ASIDE = "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
_NEXT = "<|end|><|start|>assistant"
_ID = "/[0-9A-Za-z]{1,32}/"


def call_grammar(
    format: ToolFormat,
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    *,
    parallel: bool = True,
    response: Grammar | None = None,
    special: Mapping[str, int] | None = None,
    in_reasoning: bool = False,
) -> Grammar | None:
    """Return the grammar of a reply; None if there is nothing to enforce.

    If ``choice`` is None and there are tools, it is "auto". With ``parallel`` False, at most one call is allowed.
    ``response`` is the grammar of a text that is not a call. ``special`` are the ids of the tokenizer's special tokens
    by their texts. ``in_reasoning`` says that the prompt has opened the reasoning. Raises ``InvalidField``, with the
    path in ``tools``, for a schema or a syntax that cannot be enforced.
    """
    chosen = choice or ToolChoice(mode="auto" if tools else "none")
    if chosen.mode == "none" or not tools:
        if response is None or (format.reasoning is None and format.layout != "channels"):
            return response
        maker = _Maker(format, (), False, special or {}, in_reasoning)
        return Grammar(
            source=maker.answer(response),
            field=response.field,
            fast_forward=response.fast_forward,
            distinct_keys=response.distinct_keys,
        )
    called = [(i, tool) for i, tool in enumerate(tools) if not chosen.names or tool.name in chosen.names]
    forced = chosen.mode == "required"
    if not forced and not _is_held(tools, called, parallel, response):
        return None
    several = parallel and not chosen.named and (format.parallel or not forced)
    maker = _Maker(format, called, several, special or {}, in_reasoning, forced=forced)
    if forced:
        return Grammar(source=maker.forced(), field="tools", distinct_keys=True)
    source = maker.auto() if response is None else maker.auto_or(response)
    return Grammar(source=source, field="tools", distinct_keys=True)


def _is_held(
    tools: Sequence[Tool], called: Sequence[tuple[int, Tool]], parallel: bool, response: Grammar | None
) -> bool:
    """Return whether there is anything to enforce in the reply of a model that may call tools freely."""
    held = any(tool.strict or tool.syntax is not None for _, tool in called)
    return held or not parallel or response is not None or len(called) < len(tools)


class _Maker:
    """The builder of the grammar of one reply.

    ``several`` allows more than one call. ``forced`` enforces all schemas, not only those of strict tools.
    """

    def __init__(
        self,
        format: ToolFormat,
        tools: Sequence[tuple[int, Tool]],
        several: bool,
        special: Mapping[str, int],
        in_reasoning: bool,
        *,
        forced: bool = False,
    ) -> None:
        self._format = format
        self._tools = tools
        self._maximum = MAX_CALLS if several else 1
        self._in_reasoning = in_reasoning
        self._forced = forced
        self._lark = Lark(special)

    def answer(self, response: Grammar) -> str:
        """Return the grammar of a text that follows ``response``, after reasoning if there is any, without calls."""
        return self._lark.source(f"{self._thoughts()} {self._text_of(response)}")

    def forced(self) -> str:
        """Return the grammar of calls and nothing else, after reasoning if there is any."""
        return self._lark.source(f"{self._thoughts()} {self._calls()}")

    def auto_or(self, response: Grammar) -> str:
        """Return the grammar of either calls or a text that follows ``response``."""
        options = (self._calls(marked=True), self._text_of(response))
        return self._lark.source(f"{self._thoughts()} {one_of(map(self._lark.rule, options))}")

    def auto(self) -> str:
        """Return the grammar of any text, in which calls must be valid."""
        if self._format.layout == "channels":
            return self._lark.source(f"{self._thoughts()} {self._channels()}")
        bodies = [self._lark.until(mark, self._no_call()) + " " + rest for mark, rest in self._marked()]
        body = self._lark.rule(one_of(bodies)) if bodies else ""
        tail = self._lark.free([mark for mark, _ in self._marked()], self._no_call())
        options = [*self._bare(), *([body] if body else []), tail]
        if self._maximum > 1 and self._format.text_after and body:
            again = self._lark.rule(one_of(self._lark.until(mark) + " " + rest for mark, rest in self._marked()))
            after = self._lark.free([mark for mark, _ in self._marked()])
            limit = MAX_CALLS - 2 if self._format.one_per_region or not self._format.begin else 0
            options[-2] = f"{body} {times(again, 0, limit)} {after}"
        return self._lark.source(f"{self._thoughts()} {one_of(options)}")

    # -- reasoning and texts

    def _thoughts(self) -> str:
        reasoning = self._format.reasoning
        if reasoning is None:
            return ""
        rest = self._lark.rule(self._lark.until(reasoning.end))
        whole = self._lark.rule(f"{self._lark.text(reasoning.begin)} {rest}")
        if self._format.layout == "channels":
            return f"{rest} {times(whole, 0, MAX_THOUGHTS)}" if self._in_reasoning else times(whole, 0, MAX_THOUGHTS)
        return rest if self._in_reasoning else f"({whole})?"

    def _text_of(self, response: Grammar) -> str:
        channels = self._format.layout == "channels"
        return f"{self._lark.text(_FINAL) if channels else ''} {self._lark.other(response)}"

    def _channels(self) -> str:
        lark = self._lark
        aside = lark.rule(f"{lark.text(_ASIDE)} {lark.until(_NEXT)}")
        final = lark.rule(f"{lark.text(_FINAL)} {lark.free([_NEXT, self._format.call_begin])}")
        return f"({aside})? ({final} | {self._calls()})"

    def _no_call(self) -> str:
        """Return the condition that a text does not begin as a call without a marker; "" if the format has no such
        calls."""
        if not self._format.is_bare:
            return ""
        if self._format.array:
            begins = r"\["
        elif self._format.layout == "object":
            begins = r"\{"
        else:
            begins = "(?:" + "|".join(quoted(tool.name) for _, tool in self._tools) + r")\s*[\n{`(]"
        return rf" & ~/\s*{begins}(?s:.*)/"

    # -- regions

    def _bare(self) -> list[str]:
        """Return the calls without a marker; [] if the format has none."""
        return [self._lark.rule(self._several(self._call()))] if self._format.is_bare else []

    def _marked(self) -> list[tuple[str, str]]:
        """Return the markers with which a model may begin calls, each with the expression of what follows it."""
        format, lark = self._format, self._lark
        end = lark.text(format.end)
        found = []
        for begin in filter(None, format.begin):
            inside = self._call() if format.one_per_region else self._several(self._call())
            mark = begin.rstrip()
            found.append((mark, f"{lark.text(begin[len(mark) :])} {inside} {end}"))
        if format.call_begin and (format.begin_optional or not format.begin):
            rest = self._call(begun=True)
            if not format.begin:
                rest += " " + self._more(self._call())
            found.append((format.call_begin, rest))
        return found

    def _calls(self, *, marked: bool = False) -> str:
        """Return all calls of a forced reply.

        ``marked`` uses a marker if the format has one, for replies that may be a text which begins as a call would.
        """
        format, lark = self._format, self._lark
        begins = [begin for begin in format.begin if begin or not marked]
        begin = begins[0] if begins else ""
        if format.one_per_region:
            region = lark.rule(f"{lark.text(begin)} {self._call()} {lark.text(format.end)}")
            return f"{region} {times(f'{lark.text(format.separator)} {region}', 0, self._maximum - 1)}"
        return f"{lark.text(begin)} {self._several(self._call())} {lark.text(format.end) if begin else ''}"

    def _several(self, call: str) -> str:
        calls = f"{call} {self._more(call)}"
        return f'"[" {calls} "]"' if self._format.array else calls

    def _more(self, call: str) -> str:
        return times(f"{self._lark.text(self._format.separator)} {call}", 0, self._maximum - 1)

    # -- calls

    def _call(self, *, begun: bool = False) -> str:
        """Return a call of any of the tools. ``begun`` leaves out the marker before it."""
        return self._lark.rule(one_of(self._call_of(i, tool, begun) for i, tool in self._tools))

    def _call_of(self, index: int, tool: Tool, begun: bool) -> str:
        format, lark = self._format, self._lark
        arguments = self._arguments(index, tool)
        if format.layout == "object":
            head = f"{{{_json(format.name_key)}: {_json(tool.name)}, {_json(format.arguments_keys[0])}: "
            return lark.rule(f'{lark.text(head)} {arguments} "}}"')
        begin = "" if begun else lark.text(format.call_begin)
        known = f"({lark.text(format.id_begin)} {lark.terminal(_ID)})?" if format.id_begin else ""
        name = f"{lark.text(tool.name)} {known} {lark.text(format.name_end)}"
        return lark.rule(f"{begin} {name} {arguments} {lark.text(format.call_end)}")

    def _arguments(self, index: int, tool: Tool) -> str:
        field = f"tools[{index}].{tool.kind}"
        if tool.kind == "custom":
            return self._custom(tool, field)
        schema: Any = {"type": "object", "properties": {}, "additionalProperties": False}
        if tool.parameters is not None:
            held = self._forced or tool.strict
            schema = {**tool.parameters, "type": tool.parameters.get("type", "object")} if held else {"type": "object"}
        path = f"{field}.parameters"
        return ArgumentsGrammar(self._lark, self._format, schema_value(schema, path), path).written()

    def _custom(self, tool: Tool, field: str) -> str:
        """Return the arguments of a custom tool: one string, in the tool's own syntax if it has one."""
        syntax, text = tool.syntax, dict[str, Any](type="string")
        if syntax is not None and syntax.kind == "lark":
            return self._in_grammar(syntax)
        if syntax is not None:
            text["pattern"] = f"^(?:{syntax.value})$"
        schema = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        path = syntax.field if syntax is not None else field
        return ArgumentsGrammar(self._lark, self._format, schema_value(schema, path), path).written()

    def _in_grammar(self, syntax: Constraint) -> str:
        """Return the input of a custom tool that has a grammar.

        It is unquoted if the format writes strings so; otherwise it is escaped between quotes (Python has all of JSON's
        escapes).
        """
        format, lark = self._format, self._lark
        if format.arguments == "parameters":
            begin = lark.text(format.parameter_begin + CUSTOM_INPUT + format.key_end)
            end = format.value_end.rstrip()
            if not lark.text(end.strip()).startswith("<["):  # a special token cannot be a part of the text
                marks = [mark.strip() for mark in (end, format.parameter_begin, format.call_end)]
                if ended := ended_grammar(syntax, end, marks):
                    return f"{begin} {lark.other(ended)} {lark.text(format.value_end[len(end) :])}"
            return f"{begin} {lark.other(grammar_of(syntax))} {lark.text(format.value_end)}"
        quoted = lark.other(quoted_grammar(syntax))
        if format.arguments == "keywords":
            return f"""{lark.plain(f'{CUSTOM_INPUT}="')} {quoted} {lark.plain('"')}"""
        return f"""{lark.plain(f'{{"{CUSTOM_INPUT}": "')} {quoted} {lark.plain('"}')}"""


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
