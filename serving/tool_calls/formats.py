"""The formats in which families of models write tool calls and reasoning: ``FORMATS`` has them by name."""

from __future__ import annotations

from collections.abc import Mapping

from ..interface.tool_format import Reasoning, ToolFormat

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
