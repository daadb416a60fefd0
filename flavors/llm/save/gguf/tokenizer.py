"""The tokenizer of a GGUF file, with what transformers' reader leaves out of it.

That reader knows few of the ways to split a text before merges (``tokenizer.ggml.pre``) and takes GPT-2's for the
others; it adds no token at the beginning where llama.cpp adds one by default, and always puts a space before the first
SentencePiece text alone, unless it begins with one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .....serving.interface.errors import PackagingError, reason, shown
from .header import Header
from .values import check_tokenizer_values

_ENDINGS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_LLAMA3 = (f"{_ENDINGS}|{_WORDS % '{1,3}'}",)
_QWEN2 = (f"{_ENDINGS}|{_WORDS % ''}",)
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_DIGITS = (r"\p{N}", _GPT2)
_GPT4O = (_CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?", "{1,3}"),)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)

# By tokenizer.ggml.pre: the expressions that cut a text before merges, one after the other, as in their tokenizer.json
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("lfm2", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("grok-2", "solar-open"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": (_CASED % ("", "", ""),),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
}
WHOLE_WORDS = {
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
    "glm4",
}
BEGINS = WHOLE_WORDS - {"glm4"}  # a text begins with bos unless tokenizer.ggml.add_bos_token says otherwise

# tokens that end a text for llama.cpp, whether a key names them or not
ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# keys that are read here or by transformers, and those that matter to no text
READ = {
    "model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "unknown_token_id", "padding_token_id",
    *END_KEYS, "add_bos_token", "add_eos_token", "add_space_prefix",
}  # fmt: skip
NO_MATTER = {
    "cls_token_id", "mask_token_id", "seperator_token_id", "separator_token_id", "token_type_count",
    "prefix_token_id", "suffix_token_id", "middle_token_id",
    *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
}  # fmt: skip
OFF: dict[str, Any] = {
    "add_sep_token": False,
    "remove_extra_whitespaces": False,
    "normalizer.lowercase": False,
    "normalizer.strip_accents": False,
    "suppress_tokens": [],
}


def check_tokenizer(header: Header) -> None:
    """Refuse the first key of the tokenizer that is not honoured. Raises ``PackagingError``."""
    check_tokenizer_values(header)
    for key, value in header.values.items():
        group, _, name = key.partition(".")
        if group != "tokenizer" or name in ("chat_template", "chat_templates", "huggingface.json"):
            continue
        if name.startswith("chat_template."):
            continue
        name = name.removeprefix("ggml.")
        if key.startswith("tokenizer.ggml.") and (name in READ or name in NO_MATTER):
            continue
        if not key.startswith("tokenizer.ggml.") or name not in OFF:
            header.refuse_key(key, "a file without this key")
        if value != OFF[name]:
            header.refuse_key(key, str(OFF[name]))
    model = header.values.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        header.refuse_key("tokenizer.ggml.model", "'gpt2' or 'llama'")
    if not isinstance(header.values.get("tokenizer.ggml.tokens"), list):
        header.refuse_key("tokenizer.ggml.tokens", "a list of tokens")
    if model == "gpt2" and header.values.get("tokenizer.ggml.pre") not in SPLITS:
        header.refuse_key("tokenizer.ggml.pre", f"one of {', '.join(sorted(SPLITS))}")


def end_ids(header: Header) -> list[int]:
    """Return the ids of the tokens that end a text: those that keys name, and those known by their text."""
    named = [header.values.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    tokens = header.values.get("tokenizer.ggml.tokens") or []
    kinds = header.values.get("tokenizer.ggml.token_type") or []
    # only a control token: a text may well contain the characters of one
    known = [i for i, token in enumerate(tokens) if token in ENDS and (not kinds or kinds[i] in (3, 4))]
    found = [int(i) for i in [*named, *known] if isinstance(i, int) and 0 <= i < len(tokens)]
    texts = {tokens[i] for i in found}
    if {"<|return|>", "<|call|>"} <= texts or {"<|calls|>", "<|flush|>"} <= texts:
        # harmony's messages end with <|end|>, its replies with the others
        found = [i for i in found if tokens[i] != "<|end|>"]
    return list(dict.fromkeys(found))


def read_tokenizer(header: Header, file: Path) -> Any:
    """Build the tokenizer of the GGUF file. Raises ``PackagingError``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        read = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        core = _of_the_file(header, read.backend_tokenizer)
    except Exception as error:  # from gguf's reader, tokenizers or transformers
        raise PackagingError(f"model: {header.file}: its tokenizer cannot be read: {reason(error)}") from None
    if header.values["tokenizer.ggml.model"] == "gpt2":
        _split_texts(core, header.values["tokenizer.ggml.pre"])
    else:
        _join_spaces(core, prefix=_flag(header, "add_space_prefix", True))
    begins = header.values["tokenizer.ggml.model"] == "llama" or header.values.get("tokenizer.ggml.pre") in BEGINS
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=False,
        add_bos_token=_flag(header, "add_bos_token", begins),
        add_eos_token=_flag(header, "add_eos_token", False),
        chat_template=_templates(header),
        **_special_tokens(header),
    )


def _of_the_file(header: Header, core: Any) -> Any:
    """Return ``core`` without the tokens that transformers' class has by default and the file has not."""
    from tokenizers import Tokenizer

    state = json.loads(core.to_str())
    count = len(header.values["tokenizer.ggml.tokens"])
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < count]
    known = {token["content"] for token in state["added_tokens"]} | set(header.values["tokenizer.ggml.tokens"])
    if state["model"].get("unk_token") not in known:
        state["model"]["unk_token"] = None
    state["post_processor"] = None  # made anew from the flags
    return Tokenizer.from_str(json.dumps(state))


def _special_tokens(header: Header) -> dict[str, str]:
    """Return the special tokens that the file names, or that llama.cpp assumes for its kind of tokenizer."""
    assumed = {"bos": 1, "eos": 2, "unknown": 0} if header.values["tokenizer.ggml.model"] == "llama" else {}
    tokens = header.values["tokenizer.ggml.tokens"]
    found = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = header.values.get(f"tokenizer.ggml.{theirs}_token_id", assumed.get(theirs))
        if number is None:
            continue
        if not 0 <= number < len(tokens):
            header.refuse_key(
                f"tokenizer.ggml.{theirs}_token_id", f"a number below {len(tokens)}, the number of tokens"
            )
        found[f"{ours}_token"] = tokens[number]
    return found


def _templates(header: Header) -> Any:
    """Return the chat template; with templates by name, all of them."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in header.values.items() if key.startswith(prefix)}
    default = header.values.get("tokenizer.chat_template")
    return {"default": default, **named} if named and default else default or named or None


def _flag(header: Header, name: str, default: bool) -> bool:
    value = header.values.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise PackagingError(f"model: {header.file}: tokenizer.ggml.{name} = {shown(value)} is not a boolean")
    return value


def _split_texts(core: Any, kind: str) -> None:
    """Cut texts before merges in the way of the tokenizer ``kind``."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[kind]]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.model.ignore_merges = kind in WHOLE_WORDS


def _join_spaces(core: Any, *, prefix: bool) -> None:
    """Write spaces as SentencePiece does. With ``prefix``, a space precedes each text between special tokens, also one
    that begins with a space, and none is left of it in a decoded text."""
    from tokenizers import decoders, normalizers

    spaces = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    core.pre_tokenizer = None
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
