"""The form in which a model writes tool calls and reasoning, as data; ``tool_calls.formats`` has those of families.

A format is parsed (``tool_calls.parser``) and written (``tool_calls.call_grammar``) with the same literals. White space
at the ends of a literal is written as given; a parser accepts any amount there, including none (next to a VALUE that is
a string: at most the amount that is written). A literal may contain special tokens of the tokenizer. The tokenizer
determines which parts of it are special tokens, not the format, because fine-tunes of a model differ in that.

A forced text of calls has this form, with the fields below::

    region     = begin[0] calls end            no begin, or "": only the calls, without end
    calls      = call (separator call)*        in "[" and "]" where array
    text       = region                        one_per_region: region (separator region)*, a call in each

and a call, by layout::

    object     {name_key: NAME, arguments_keys[0]: ARGUMENTS}
    named      call_begin NAME name_end ARGUMENTS call_end
    channels   the same as named; everything else is written in messages with headers, as in OpenAI's harmony

and ARGUMENTS, by arguments::

    json       a JSON object
    keywords   k=v, k=v                        values in Python's notation
    parameters (parameter_begin KEY key_end VALUE value_end)*
               a string without quotes, any other value as JSON
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from msgspec import Struct

Layout: TypeAlias = Literal["object", "named", "channels"]
Arguments: TypeAlias = Literal["json", "keywords", "parameters"]
CUSTOM_INPUT = "input"  # the string argument that stands for the input of a custom tool in all formats


class Reasoning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The literals before and after a model's reasoning."""

    begin: str
    end: str


class ToolFormat(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The way in which a model writes calls and reasoning. It is packaged with the model as JSON, where it can be
    changed.

    ``begin`` are the literals that may open a region of calls, and ``arguments_keys`` the keys that an object may have
    for its arguments: the first is written, all are parsed. With ``begin_optional``, calls are also parsed outside a
    region. ``id_begin`` is a literal that may stand between a name and ``name_end``, before an id, which is skipped.
    ``key_end_json`` is a ``key_end`` after which the value is JSON of any type, in formats that mark each value so.
    ``ids`` is the form of call ids that the template requires: "alnum9" is nine letters and digits (Mistral), "" is
    any form.

    ``text_before`` and ``text_after`` say whether models write text before and after calls in the same turn;
    ``parallel``, whether they write several calls. These three apply only to forced calls; a parser accepts all of it.
    With ``calls_in_reasoning``, a call ends the reasoning, and the model then leaves out the end of the reasoning.
    """

    name: str
    layout: Layout
    arguments: Arguments = "json"
    begin: tuple[str, ...] = ()
    begin_optional: bool = False
    end: str = ""
    array: bool = False
    one_per_region: bool = False
    separator: str = ""
    call_begin: str = ""
    name_end: str = ""
    id_begin: str = ""
    call_end: str = ""
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    parameter_begin: str = ""
    key_end: str = ""
    key_end_json: str = ""
    value_end: str = ""
    ids: Literal["", "alnum9"] = ""
    text_before: bool = True
    text_after: bool = True
    parallel: bool = True
    calls_in_reasoning: bool = False
    reasoning: Reasoning | None = None

    @property
    def literals(self) -> Iterator[str]:
        """All literals, each of which may contain special tokens."""
        yield from self.begin
        yield from (self.end, self.separator, self.call_begin, self.name_end, self.id_begin, self.call_end)
        yield from (self.parameter_begin, self.key_end, self.key_end_json, self.value_end)
        if self.reasoning is not None:
            yield from (self.reasoning.begin, self.reasoning.end)

    @property
    def is_bare(self) -> bool:
        """Whether a call may have no marker; such a call is parsed only at the beginning of a text."""
        return "" in self.begin or not (self.begin or self.call_begin)
