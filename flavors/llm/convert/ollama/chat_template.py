"""A chat template in Jinja from the TEMPLATE, SYSTEM and MESSAGE of a Modelfile.

A template of the older kind has ``.System``, ``.Prompt`` and ``.Response``. Ollama writes it once for each turn, and of
the last one only what stands before the response. One of the newer kind ranges over ``.Messages``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .....serving.sandbox import MAX_TEMPLATE
from .go_template import Assignment, Continue, If, Output, Parser, Range, Unconverted, literal

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
NO_ROLE = "this model's template has places for messages of system, user and assistant alone"
# consecutive messages of a role are one, as in Ollama
MERGE = """\
{%- set ns = namespace(role='', text='', merged=[], all=[], system='', prompt='', response='') -%}
{%- for m in messages -%}
{%- if m['role'] not in ['system', 'user', 'assistant'] -%}{{- raise_exception(NO_ROLE) -}}{%- endif -%}
{%- if m['role'] == 'system' -%}{%- set ns.all = ns.all + [m['content'] or ''] -%}{%- endif -%}
{%- if m['role'] == ns.role -%}{%- set ns.text = ns.text + '\\n\\n' + (m['content'] or '') -%}
{%- else -%}
{%- if ns.role -%}{%- set ns.merged = ns.merged + [{'role': ns.role, 'content': ns.text}] -%}{%- endif -%}
{%- set ns.role = m['role'] -%}{%- set ns.text = m['content'] or '' -%}
{%- endif -%}
{%- endfor -%}
{%- set ns.merged = ns.merged + [{'role': ns.role, 'content': ns.text}] -%}
"""
TURNS = """\
{%- for m in ns.merged -%}
{%- if m['role'] == 'system' -%}
{%- if ns.prompt or ns.response -%}
{{- turn(ns.system, ns.prompt, ns.response) -}}{%- set ns.prompt = '' -%}{%- set ns.response = '' -%}
{%- endif -%}
{%- set ns.system = m['content'] -%}
{%- elif m['role'] == 'user' -%}
{%- if ns.response -%}
{{- turn(ns.system, ns.prompt, ns.response) -}}{%- set ns.system = '' -%}{%- set ns.response = '' -%}
{%- endif -%}
{%- set ns.prompt = m['content'] -%}
{%- else -%}{%- set ns.response = m['content'] -%}{%- endif -%}
{%- endfor -%}
{{- last(ns.system, ns.prompt, ns.response) -}}
"""


def converted(source: str, before: str) -> str:
    """Return Ollama's template as one in Jinja, with ``before`` (the tokenizer's first token) at its start.

    Raises ``Unconverted``, which names the line of what has no conversion. Parts for tools and thinking, which Ollama
    sets itself, are left out, and a warning says so.
    """
    if len(source) > MAX_TEMPLATE:
        raise Unconverted(f"the template has {len(source)} characters; at most {MAX_TEMPLATE} are allowed")
    parser = Parser(source)
    try:
        nodes = parser.parse()
    except RecursionError:
        raise Unconverted("the template is nested too deeply") from None
    if parser.unset:
        logger.warning("TEMPLATE: without the parts of the template for %s", ", ".join(sorted(parser.unset)))
    start = f"{{{{- {literal(before)} -}}}}" if before else ""
    start += "{%- set v = namespace() -%}" if any(isinstance(node, Assignment) for node in _walk(nodes)) else ""
    merge = MERGE.replace("NO_ROLE", literal(NO_ROLE))
    if any(isinstance(node, Range) for node in _walk(nodes)):
        system = "{%- set system = ns.all | join('\\n\\n') -%}{%- set response = '' -%}{%- set prompt = '' -%}"
        return start + merge + system + _jinja(nodes)
    if not any(isinstance(node, Output) and node.is_response for node in _walk(nodes)):
        nodes = [*nodes, Output("response", is_response=True)]
    macros = "".join(
        f"{{%- macro {name}(system, prompt, response) -%}}{_jinja(body)}{{%- endmacro -%}}"
        for name, body in (("turn", nodes), ("last", _cut(nodes)[0]))
    )
    return start + macros + merge + TURNS


def with_messages(template: str, system: str | None, examples: Sequence[Mapping[str, str]]) -> str:
    """Return a chat template that puts ``system`` before a conversation without such a message, and then ``examples``.

    A conversation's own system message comes in place of ``system``."""
    if system is None and not examples:
        return template
    shown = ", ".join(f"{{'role': {literal(one['role'])}, 'content': {literal(one['content'])}}}" for one in examples)
    first = "[]" if system is None else f"[{{'role': 'system', 'content': {literal(system)}}}]"
    own = "messages[0]['role'] == 'system'"
    begin = f"{{%- set messages = (messages[:1] if {own} else {first}) + [{shown}]"
    return f"{begin} + (messages[1:] if {own} else messages) -%}}{template}"


def _jinja(nodes: list[Any]) -> str:
    written = []
    for node in nodes:
        if isinstance(node, Output):
            written.append(f"{{{{- {node.expression} -}}}}")
        elif isinstance(node, If):
            otherwise = f"{{%- else -%}}{_jinja(node.otherwise)}" if node.otherwise else ""
            written.append(f"{{%- if {node.condition} -%}}{_jinja(node.then)}{otherwise}{{%- endif -%}}")
        elif isinstance(node, Assignment):
            written.append(f"{{%- set v.{node.name} = {node.expression} -%}}")
        elif isinstance(node, Continue):
            written.append("{%- continue -%}")
        else:
            written.append(f"{{%- for m in ns.merged -%}}{_jinja(node.body)}{{%- endfor -%}}")
    return "".join(written)


def _cut(nodes: list[Any]) -> tuple[list[Any], bool]:
    """Return the nodes up to the response, which a running turn ends with, and whether it was found."""
    kept: list[Any] = []
    for node in nodes:
        if isinstance(node, If):
            then, found = _cut(node.then)
            otherwise, found_there = ([], True) if found else _cut(node.otherwise)
            kept.append(If(node.condition, then, otherwise))
            if found or found_there:
                return kept, True
        else:
            kept.append(node)
            if isinstance(node, Output) and node.is_response:
                return kept, True
    return kept, False


def _walk(nodes: list[Any]) -> list[Any]:
    found = []
    for node in nodes:
        found.append(node)
        if isinstance(node, If):
            found += _walk(node.then) + _walk(node.otherwise)
        elif isinstance(node, Range):
            found += _walk(node.body)
    return found
