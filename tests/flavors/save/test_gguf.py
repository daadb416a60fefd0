"""GGUF files against llama.cpp: the same logits and token ids, or a refusal that names the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from gguf_files import (
    BOS,
    END,
    EOS,
    SENTENCEPIECE,
    SIZES,
    VOCAB,
    byte_level,
    llama_cpp,
    random_model,
    sentencepiece,
    sentencepiece_tokens,
    write,
)
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle
from mlflow_llm.flavors.llm.save.gguf import tokenizer as gguf_tokenizer
from mlflow_llm.serving.tasks.prompt.text import TextModel

gguf = pytest.importorskip("gguf")
PROMPTS = [[1, 40, 7, 99, 12], [(i * 37 + 11) % 256 for i in range(60)], [(i * 91 + 5) % 256 for i in range(200)]]
THETA = 5000.0
TEXTS = [
    "Hello the world, it's 12345 o'clock!\n\n  Indented\t\tTabs   end ",
    "  leading  spaces",
    "Ünïcödé 東京 मानक DON'T it'S 3.14159 x=y+1;\r\nfor(i=0;i<10;++i){ }  ",
    "",
]


def placed(source: Path, target: Path) -> Any:
    """Log the file and load what is stored, with transformers."""
    llm.save_model(target, source)
    return tf.AutoModelForCausalLM.from_pretrained(target / "model", attn_implementation="eager")


def assert_as_llama_cpp(model: Any, file: Path, tolerance: float = 1e-3) -> None:
    """Assert that the log probabilities of ``model`` are llama.cpp's for ``file``."""
    pytest.importorskip("xllamacpp", reason="llama.cpp's own logits need the package xllamacpp")
    expected, _, _ = llama_cpp(file, PROMPTS)
    for prompt, entries in zip(PROMPTS, expected, strict=True):
        with torch.no_grad():
            found = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].float(), -1)
        assert len(entries) == VOCAB
        assert max(abs(value - found[token].item()) for token, value in entries.items()) < tolerance


def scaling(kind: Any, factor: float, **more: Any) -> Any:
    def keys(writer: Any) -> None:
        writer.add_rope_freq_base(THETA)
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        for name, value in more.items():
            getattr(writer, f"add_rope_scaling_{name}")(value)

    return keys


KINDS = gguf.RopeScalingType
ROPES: dict[str, tuple[Any, dict[str, np.ndarray]]] = {
    "base": (lambda writer: writer.add_rope_freq_base(THETA), {}),
    "none": (scaling(KINDS.NONE, 4.0), {}),
    "linear": (scaling(KINDS.LINEAR, 4.0), {}),
    "linear without a type": (
        lambda writer: (writer.add_rope_freq_base(THETA), writer.add_rope_scaling_factor(2.5)),
        {},
    ),
    "old name of the factor": (lambda writer: writer.add_float32("llama.rope.scale_linear", 3.0), {}),
    "yarn": (scaling(KINDS.YARN, 4.0, orig_ctx_len=128), {}),
    "yarn with a scale": (scaling(KINDS.YARN, 4.0, orig_ctx_len=128, attn_factors=1.2), {}),
    "linear with a scale": (scaling(KINDS.LINEAR, 2.0, attn_factors=1.2), {}),
    "frequencies": (
        lambda writer: writer.add_rope_freq_base(THETA),
        {"rope_freqs.weight": np.array([1, 1, 1.5, 2, 4, 7, 8, 8], np.float32)},
    ),
    "frequencies and linear": (scaling(KINDS.LINEAR, 2.0), {"rope_freqs.weight": np.linspace(1, 8, 8, dtype="f4")}),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling(tmp_path, name):
    """Every scaling of rotary embeddings gives llama.cpp's logits."""
    keys, tensors = ROPES[name]
    file = write(tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), keys=keys, tensors=tensors)
    assert_as_llama_cpp(placed(file, tmp_path / "m"), file)


def test_long_rope(tmp_path):
    """The factors for short texts give llama.cpp's logits, and the context ends where they do."""
    tensors = {
        "rope_factors_short.weight": np.linspace(1, 2, 8, dtype="f4"),
        "rope_factors_long.weight": np.linspace(2, 9, 8, dtype="f4"),
    }
    keys = scaling(KINDS.LONGROPE, 1.0, orig_ctx_len=512, attn_factors=1.1)
    config = tf.LlamaConfig(**SIZES | {"max_position_embeddings": 2048})
    file = write(tmp_path / "x.gguf", random_model(config), keys=keys, tensors=tensors)
    model = placed(file, tmp_path / "m")
    with llm.load_model(str(tmp_path / "m")) as loaded:
        assert loaded.complete("a", max_tokens=1).usage.completion_tokens == 1
    assert model.config.rope_parameters["original_max_position_embeddings"] == 512
    assert_as_llama_cpp(model, file)


def _gemma(writer: Any) -> None:
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_freq_base(THETA)
    writer.add_sliding_window(7)


def _gemma2(writer: Any) -> None:
    _gemma(writer)
    writer.add_attn_logit_softcapping(5.0)
    writer.add_final_logit_softcapping(20.0)


def _gemma3(writer: Any) -> None:
    _gemma(writer)
    writer.add_rope_scaling_type(KINDS.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def _wide(writer: Any) -> None:
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_dimension_count(32)


def _starcoder2(writer: Any) -> None:
    writer.add_layer_norm_eps(1e-3)
    writer.add_rope_freq_base(THETA)


def _phi3(writer: Any) -> None:
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(THETA)
    writer.add_sliding_window(0)


def _causal(writer: Any) -> None:
    writer.add_causal_attention(True)
    writer.add_expert_count(0)


GEMMA = SIZES | {"num_hidden_layers": 8, "head_dim": 32}
# none of these sizes and values is the default of the family's config class
FAMILIES: dict[str, tuple[str, Any, Any, float]] = {
    "llama": ("llama", lambda: tf.LlamaConfig(**SIZES, rms_norm_eps=1e-2), _causal, 1e-3),
    "llama with biases": ("llama", lambda: tf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), _causal, 1e-3),
    "llama with wide heads": ("llama", lambda: tf.LlamaConfig(**SIZES, head_dim=32), _wide, 1e-3),
    "llama with tied heads": ("llama", lambda: tf.LlamaConfig(**SIZES, tie_word_embeddings=True), _causal, 1e-3),
    "qwen2": ("qwen2", lambda: tf.Qwen2Config(**SIZES), _causal, 1e-3),
    "qwen3": ("qwen3", lambda: tf.Qwen3Config(**SIZES, head_dim=32), _wide, 1e-3),
    "phi3": ("phi3", lambda: tf.Phi3Config(**SIZES), _phi3, 1e-3),
    # llama.cpp looks its GELU up in a table of half-precision floats
    "gemma2": ("gemma2", lambda: tf.Gemma2Config(**GEMMA), _gemma2, 1e-2),
    "gemma3": ("gemma3", lambda: tf.Gemma3TextConfig(**GEMMA), _gemma3, 1e-2),
    "starcoder2": ("starcoder2", lambda: tf.Starcoder2Config(**SIZES), _starcoder2, 1e-2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_family(tmp_path, name):
    """A file of each architecture gives llama.cpp's logits: sizes, windows, soft caps, biases, base frequencies."""
    architecture, config, keys, tolerance = FAMILIES[name]
    file = write(tmp_path / "x.gguf", random_model(config()), architecture, keys=keys)
    assert_as_llama_cpp(placed(file, tmp_path / "m"), file, tolerance)


REFUSED: dict[str, tuple[Any, str]] = {
    "experts": (lambda w: w.add_expert_count(8), r"llama\.expert_count = 8 .* expected 0"),
    "window": (lambda w: w.add_sliding_window(128), r"llama\.attention\.sliding_window = 128"),
    "soft cap": (lambda w: w.add_final_logit_softcapping(30.0), r"llama\.final_logit_softcapping = 30\.0"),
    "logit scale": (lambda w: w.add_logit_scale(0.5), r"llama\.logit_scale = 0\.5 .* expected 0\.0 or 1\.0"),
    "residual scale": (lambda w: w.add_residual_scale(0.5), r"llama\.residual_scale"),
    "embedding scale": (lambda w: w.add_embedding_scale(12.0), r"llama\.embedding_scale"),
    "attention scale": (lambda w: w.add_attention_scale(0.5), r"llama\.attention\.scale = 0\.5"),
    "latent attention": (lambda w: w.add_kv_lora_rank(16), r"llama\.attention\.kv_lora_rank = 16"),
    "not causal": (lambda w: w.add_causal_attention(False), r"llama\.attention\.causal = False .* expected True"),
    "values of another size": (lambda w: w.add_value_length(8), r"llama\.attention\.value_length = 8 .* expected 16"),
    "part of a head": (lambda w: w.add_rope_dimension_count(8), r"llama\.rope\.dimension_count = 8 .* expected 16"),
    "base scaling": (lambda w: w.add_float32("llama.rope.scaling.alpha", 8.0), r"llama\.rope\.scaling\.alpha = 8\.0"),
    "scaling of an unknown type": (
        lambda w: w.add_string("llama.rope.scaling.type", "dynamic"),
        r"llama\.rope\.scaling\.type = 'dynamic' .* expected none, linear, yarn or longrope",
    ),
    "longrope without factors": (
        lambda w: w.add_rope_scaling_type(KINDS.LONGROPE),
        r"llama\.rope\.scaling\.type = 'longrope' .* rope_factors_short\.weight",
    ),
    "a key of the future": (lambda w: w.add_uint32("llama.attention.novelty", 1), r"llama\.attention\.novelty = 1"),
    "heads by layer": (
        lambda w: w.add_array("llama.attention.key_length", [16, 16]),
        r"llama\.attention\.key_length",
    ),
    "part of a file": (lambda w: w.add_uint16("split.count", 2), r"split\.count = 2 .* expected one file"),
    "an adapter": (lambda w: w.add_string("general.type", "adapter"), r"general\.type = 'adapter'"),
    "tokens to suppress": (
        lambda w: w.add_array("tokenizer.ggml.suppress_tokens", [1]),
        r"tokenizer\.ggml\.suppress_tokens = \[1\]",
    ),
    "a size of another kind": (
        lambda w: w.add_string("llama.vocab_size", "many"),
        r"vocab_size = 'many' .* whole number",
    ),
    "no heads for keys": (
        lambda w: w.add_head_count_kv(0),
        r"head_count_kv = 0 .* expected a whole number of at least 1",
    ),
    "a base that is none": (lambda w: w.add_rope_freq_base(math.nan), r"rope\.freq_base = nan .* a number above 0"),
    "an endless factor": (scaling(KINDS.LINEAR, math.inf), r"rope\.scaling\.factor = inf .* a number of at least 0"),
    "no norm": (lambda w: w.add_layer_norm_rms_eps(-1.0), r"layer_norm_rms_epsilon = -1\.0 .* at least 0"),
    "heads that do not divide": (lambda w: w.add_head_count(5), r"x\.gguf: its keys make no llama: "),
    "scores of some tokens": (
        lambda w: w.add_array("tokenizer.ggml.scores", [1.0, 3.0]),
        rf"tokenizer\.ggml\.scores = \[1\.0, 3\.0\] .* expected {VOCAB} values",
    ),
    "a token that is no number": (
        lambda w: w.add_string("tokenizer.ggml.eot_token_id", "2"),
        r"tokenizer\.ggml\.eot_token_id = '2' .* expected the id of a token",
    ),
    "a sampler": (lambda w: w.add_uint32("general.sampling.mirostat", 2), r"general\.sampling\.mirostat = 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_key_without_effect_refuses_the_file(tmp_path, name):
    """A key that cannot be honoured refuses the file by the key, its value and what is expected."""
    keys, message = REFUSED[name]
    file = write(tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), keys=keys)
    with pytest.raises(MlflowException, match=message):
        llm.save_model(tmp_path / "m", file)


def test_tensor_without_a_place_refuses_the_file(tmp_path):
    """A tensor that the architecture's class has no place for refuses the file by its name."""
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    file = write(tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), tensors=extra)
    with pytest.raises(MlflowException, match=r"no place for: blk\.0\.attn_q_norm\.weight"):
        llm.save_model(tmp_path / "m", file)


def test_unknown_architecture_is_refused(tmp_path):
    """An architecture whose keys are not known is refused by name."""
    file = write(tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), "arctic")
    with pytest.raises(MlflowException, match=r"general\.architecture = 'arctic' .* expected one of .*llama"):
        llm.save_model(tmp_path / "m", file)


@pytest.mark.parametrize("key", ["eot_token_id", "eom_token_id"])
def test_end_of_turn_ends_a_text(tmp_path, key):
    """The tokens that keys name as the end of a turn or message end a text, beside the end of a text."""

    def tokenizer(writer: Any) -> None:
        byte_level(writer)
        writer.add_uint32(f"tokenizer.ggml.{key}", 33)

    file = write(tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), tokenizer=tokenizer)
    llm.save_model(tmp_path / "m", file)
    # <|im_end|> ends a text without a key, as in llama.cpp
    saved = json.loads((tmp_path / "m/model/generation_config.json").read_text())
    assert set(saved["eos_token_id"]) == {EOS, END, 33}
    with llm.load_model(str(tmp_path / "m")) as model:
        reply = model.complete("a", max_tokens=5, temperature=0, logit_bias={"33": 100})
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("stop", 1)


def test_upper_case_suffix(tmp_path):
    """A file called ``X.GGUF`` is read like ``x.gguf``."""
    file = write(tmp_path / "X.GGUF", random_model(tf.LlamaConfig(**SIZES)))
    assert placed(file, tmp_path / "m").config.hidden_size == SIZES["hidden_size"]


def test_sampling_defaults(tmp_path):
    """The sampling that a file recommends becomes the model's defaults."""

    def keys(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.25)
        writer.add_int32("general.sampling.top_k", 7)

    llm.save_model(tmp_path / "m", write(tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), keys=keys))
    saved = json.loads((tmp_path / "m/model/generation_config.json").read_text())
    assert math.isclose(saved["temperature"], 0.25)
    assert saved["top_k"] == 7


def test_named_chat_templates(tmp_path):
    """Templates by name are stored beside the default one."""

    def tokenizer(writer: Any) -> None:
        byte_level(writer)
        writer.add_chat_template(
            [{"name": "default", "template": "a{{ messages }}"}, {"name": "tool_use", "template": "b{{ messages }}"}]
        )

    llm.save_model(
        tmp_path / "m", write(tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), tokenizer=tokenizer)
    )
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "m/tokenizer").chat_template == {
        "default": "a{{ messages }}",
        "tool_use": "b{{ messages }}",
    }


@pytest.mark.parametrize("pre", sorted(gguf_tokenizer.SPLITS))
def test_texts_are_split_as_by_llama_cpp(tmp_path, pre):
    """Each pre-tokenizer gives llama.cpp's token ids, with the token at the beginning where it adds one."""
    pytest.importorskip("xllamacpp", reason="llama.cpp's own token ids need the package xllamacpp")
    file = write(
        tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), tokenizer=lambda writer: byte_level(writer, pre)
    )
    llm.save_model(tmp_path / "m", file)
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path / "m/tokenizer")
    _, expected, _ = llama_cpp(file, texts=TEXTS)
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == expected


AWKWARD = [
    "", " ", "  ", "   ", "a", " a", "  a", "   a", "a ", "a  ", "a   b", "hello world", " hello  world ", "\n", "\n\n",
    "a\n\nb", " \n ", "\t", "a\tb", "\r\n", "😀", "a😀b", "😀😀 😀", "你好世界", "你 好", "こんにちは世界、", "größe",
    "é", "e\u0301", "ﬁ", "Ａ", "\u00a0", "a\u00a0b", "\u200b", "\u2028", "\u3000a", "\ufeffa", "▁", "▁a", "a▁b", "<s>",
    "</s>", "<s>a", "a<s>b", "a </s> b", "<s> a", "<s>  a", "a</s>", "<unk>", "a<unk>b", "<0x41>", "a<0x41>", "<pad>",
    "<bos>a", "<start_of_turn>user\nhi<end_of_turn>\n", "<start_of_turn> user", "<h1> a", "a <h1>",
    "[INST] hello [/INST]", "[INST]hello[/INST] a", "<|extra|>", "<|extra|> a", "a <|extra|> b", "a<|extra|>b",
    "the hello world",
    "The Hello!? 'Twas 1234567", "    def f(x):\n        return {x: 1}", "x" * 50, "ab " * 20, "\x00", "\x01\x7f",
    "العربية", "हिन्दी", "ไทย", "🏳️‍🌈👨‍👩‍👧", "\U0010ffff", "½ ² ™", "a\u0301\u0302", "  leading", "trailing  ",
    "\n  indented\n\n\n", "\t\t",
]  # fmt: skip


@pytest.mark.parametrize("style", SENTENCEPIECE)
def test_sentencepiece_texts_are_those_of_llama_cpp(tmp_path, style):
    """Its tokens of a text, and its text of tokens, are llama.cpp's, whose server leaves the space before a text."""
    pytest.importorskip("xllamacpp", reason="llama.cpp's own token ids need the package xllamacpp")
    file = write(
        tmp_path / "x.gguf",
        random_model(tf.LlamaConfig(**SIZES | {"vocab_size": len(sentencepiece_tokens(style))})),
        tokenizer=lambda writer: sentencepiece(writer, style),
    )
    llm.save_model(tmp_path / "m", file)
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path / "m/tokenizer")
    _, expected, decoded = llama_cpp(file, texts=AWKWARD)
    named = lambda ids: tokenizer.convert_ids_to_tokens(ids)  # noqa: E731
    assert [named(tokenizer(text)["input_ids"]) for text in AWKWARD] == [named(ids) for ids in expected]
    served = TextModel(read_bundle(tmp_path / "m"))
    for ids, text in zip(expected, decoded, strict=True):
        assert served.decode(ids[1:], skip_special_tokens=False) == text[style != "gemma" and text[:1] == " " :]
        pieces = served.detokenizer(skip_special_tokens=False, before=ids[:1])
        assert "".join([*(pieces.push(token) for token in ids[1:]), pieces.flush()]) == text


def test_unknown_split_is_refused(tmp_path):
    """A pre-tokenizer that is not known is refused by name: another one would give other token ids."""
    file = write(
        tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), tokenizer=lambda writer: byte_level(writer, "novel")
    )
    with pytest.raises(MlflowException, match=r"tokenizer\.ggml\.pre = 'novel' .* expected one of .*llama-bpe"):
        llm.save_model(tmp_path / "m", file)


@pytest.mark.parametrize("flag", [True, False, None])
def test_beginning_of_a_text(tmp_path, flag):
    """A text begins with bos if the key says so; without the key, if llama.cpp begins it so."""

    def tokenizer(writer: Any) -> None:
        byte_level(writer, "llama-bpe")
        if flag is not None:
            writer.add_add_bos_token(flag)

    llm.save_model(
        tmp_path / "m", write(tmp_path / "x.gguf", random_model(tf.LlamaConfig(**SIZES)), tokenizer=tokenizer)
    )
    ids = tf.AutoTokenizer.from_pretrained(tmp_path / "m/tokenizer")("a")["input_ids"]
    assert ids[:-1] == ([] if flag is False else [BOS])
