"""The formats in which families of models write tool calls and reasoning, as data: ``FORMATS`` has them by name.

A format is parsed (``parser``) and written (``forced``) with the same literals. White space at the ends of a literal is
written as given; a parser accepts any amount there, including none (next to a VALUE that is a string: at most the
amount that is written). A literal may contain special tokens of the tokenizer. The tokenizer determines which parts of
it are special tokens, not the format, because fine-tunes of a model differ in that.

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

from collections.abc import Iterator, Mapping
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
    """How a model writes calls and reasoning. It is packaged with the model as JSON, where it can be changed.

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


REASONING: Mapping[str, Reasoning] = {
    "think": Reasoning(begin="<think>\n", end="\n</think>\n\n"),  # Qwen3, DeepSeek R1, GLM-4.5, Granite 4, and most
    "magistral": Reasoning(begin="[THINK]", end="[/THINK]"),
    "harmony": Reasoning(begin="<|channel|>analysis<|message|>", end="<|end|><|start|>assistant"),
}

_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"

_ALL = (
    # Hermes 2 Pro, Qwen2.5, Qwen3, Granite 4
    ToolFormat(
        name="hermes",
        layout="object",
        begin=("<tool_call>\n",),
        end="\n</tool_call>",
        one_per_region=True,
        separator="\n",
    ),
    # Qwen3-Coder, Qwen3.5
    ToolFormat(
        name="qwen3_coder",
        layout="named",
        arguments="parameters",
        begin=("<tool_call>\n",),
        begin_optional=True,
        end="\n</tool_call>",
        one_per_region=True,
        separator="\n",
        call_begin="<function=",
        name_end=">\n",
        call_end="</function>",
        parameter_begin="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>\n",
        calls_in_reasoning=True,
    ),
    # Llama 3.1, 3.2, 3.3
    ToolFormat(
        name="llama3_json",
        layout="object",
        begin=("", "<|python_tag|>"),
        separator="; ",
        arguments_keys=("parameters", "arguments"),
        text_before=False,
        text_after=False,
        parallel=False,
    ),
    # Llama 4; also Llama 3.2 if its system prompt asks for it
    ToolFormat(
        name="llama4_pythonic",
        layout="named",
        arguments="keywords",
        begin=("", "<|python_start|>"),
        end="<|python_end|>",
        array=True,
        separator=", ",
        name_end="(",
        call_end=")",
        text_before=False,
        text_after=False,
    ),
    # Mistral 7B v0.3, Nemo, Large 2407
    ToolFormat(
        name="mistral_v3",
        layout="object",
        begin=("[TOOL_CALLS] ",),
        array=True,
        separator=", ",
        ids="alnum9",
        text_after=False,
    ),
    # Mistral Small 3.2, Magistral, Devstral, Ministral 3
    ToolFormat(
        name="mistral_v11",
        layout="named",
        call_begin="[TOOL_CALLS]",
        name_end="[ARGS]",
        id_begin="[CALL_ID]",
        ids="alnum9",
        text_after=False,
    ),
    ToolFormat(
        name="chatglm3",
        layout="named",
        arguments="keywords",
        name_end="\n ```python\ntool_call(",
        call_end=")\n```",
        text_before=False,
        text_after=False,
        parallel=False,
    ),
    ToolFormat(name="glm4", layout="named", name_end="\n", text_before=False, text_after=False, parallel=False),
    # GLM-4.5, 4.6; GLM-4.7 and 5 omit the white space
    ToolFormat(
        name="glm45",
        layout="named",
        arguments="parameters",
        call_begin="<tool_call>",
        name_end="\n",
        call_end="</tool_call>",
        separator="\n",
        parameter_begin="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
    ),
    # Granite 3.0 writes <tool_call>, later ones <|tool_call|>
    ToolFormat(
        name="granite3",
        layout="object",
        begin=("<|tool_call|>", "<tool_call>"),
        array=True,
        separator=", ",
        text_after=False,
    ),
    ToolFormat(
        name="phi4_mini",
        layout="object",
        begin=("<|tool_call|>", "functools"),
        end="<|/tool_call|>",
        array=True,
        separator=", ",
        text_after=False,
    ),
    # DeepSeek V3, R1
    ToolFormat(
        name="deepseek_v3",
        layout="named",
        begin=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        separator="\n",
        call_begin=_DEEPSEEK_CALL + "function<｜tool▁sep｜>",
        name_end="\n```json\n",
        call_end="\n```<｜tool▁call▁end｜>",
        text_after=False,
    ),
    ToolFormat(
        name="deepseek_v31",
        layout="named",
        begin=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        call_begin=_DEEPSEEK_CALL,
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        text_after=False,
    ),
    # gpt-oss
    ToolFormat(
        name="harmony",
        layout="channels",
        call_begin="<|channel|>commentary to=functions.",
        name_end=" <|constrain|>json<|message|>",
        call_end="<|call|>",
        parallel=False,
        reasoning=REASONING["harmony"],
    ),
    # Kimi K2
    ToolFormat(
        name="kimi_k2",
        layout="named",
        begin=("<|tool_calls_section_begin|>",),
        end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>functions.",
        id_begin=":",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        text_after=False,
    ),
    # this server's own format, for templates without tools: the form that small models have seen most often
    ToolFormat(
        name="generic",
        layout="object",
        begin=("<tool_call>\n",),
        end="\n</tool_call>",
        one_per_region=True,
        separator="\n",
    ),
)
FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _ALL}
