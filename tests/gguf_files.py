"""GGUF files of tiny random models, as converters write them, and llama.cpp's own answers for them."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

# the alphabet of byte-level vocabularies, one merge (llama.cpp requires a list), and three control tokens
MERGES = [("t", "h"), ("Ġ", "th")]
CONTROL = ["<s>", "</s>", "<|im_end|>"]


def vocabulary() -> list[str]:
    """Return the tokens, by id."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, *("".join(pair) for pair in MERGES), *CONTROL]


VOCAB = 256 + len(MERGES) + len(CONTROL)
BOS, EOS, END = VOCAB - 3, VOCAB - 2, VOCAB - 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": BOS, "eos_token_id": EOS,
    "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip


def random_model(config: Any) -> Any:
    """Make a model whose weights are random, biases and norms too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write(
    file: Path,
    model: Any,
    architecture: str = "llama",
    *,
    keys: Callable[[Any], object] = lambda writer: None,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: Callable[[Any], object] | None = None,
) -> Path:
    """Write ``model`` to ``file``. ``keys`` and ``tokenizer`` add keys to the writer; ``tensors`` are further ones."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if (epsilon := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(epsilon)
    keys(writer)
    (tokenizer or byte_level)(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = _renamed(name, architecture)
        values = tensor.float().numpy()
        if architecture == "llama" and re.search(r"attn_[qk]\.", found):
            heads = config.num_attention_heads if "attn_q" in found else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and found.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(found, np.ascontiguousarray(values))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_level(writer: Any, pre: str = "gpt-2") -> None:
    """Add the keys of a byte-level tokenizer."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types([1] * (VOCAB - len(CONTROL)) + [3] * len(CONTROL))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)


# tokens of a SentencePiece vocabulary: merges, the first ones before the others, and the letters that are not bytes
PIECES = [
    "▁▁", "he", "in", "▁t", "▁a", "lo", "▁▁▁▁", "▁the", "hel", "hello", "▁hello", "wor", "ld", "▁wor", "▁world", "re",
    "▁▁▁a", "\n▁▁", "ing", "de", "▁de", "世界", "ge", "gr", "▁b", "us", "er", "user", "▁user", *"▁abcdefghilnorstuwxy",
    *".,(){}:1你世界ößé\n",
]  # fmt: skip
# each style's special tokens and the kinds of these (2 unknown, 3 control), and the tokens that its users defined
SENTENCEPIECE: dict[str, tuple[list[str], list[int], list[str]]] = {
    "llama": (["<unk>", "<s>", "</s>"], [2, 3, 3], []),
    "mistral": (["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], [2, 3, 3, 3, 3], ["<|extra|>"]),
    "gemma": (
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"], [3, 3, 3, 2, 3, 3],
        ["\n", "\n\n", "  ", "   ", "<h1>"],
    ),
}  # fmt: skip


def sentencepiece_tokens(style: str) -> list[str]:
    """Return the tokens of a SentencePiece vocabulary in the ``style`` of a family, by id."""
    special, _, defined = SENTENCEPIECE[style]
    pieces = [piece for piece in PIECES if piece not in defined]
    return [*special, *defined, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]


def sentencepiece(writer: Any, style: str) -> None:
    """Add the keys of a SentencePiece tokenizer."""
    special, kinds, defined = SENTENCEPIECE[style]
    tokens = sentencepiece_tokens(style)
    pieces = len(tokens) - len(special) - len(defined) - 256
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (len(tokens) - pieces) + [-float(i) for i in range(pieces)])
    writer.add_token_types([*kinds, *[4] * len(defined), *[6] * 256, *[1] * pieces])
    writer.add_bos_token_id(2 if style == "gemma" else 1)
    writer.add_eos_token_id(1 if style == "gemma" else 2)
    writer.add_unk_token_id(special.index("<unk>"))
    if style == "gemma":
        writer.add_add_space_prefix(False)


def _renamed(name: str, architecture: str) -> str:
    norms = {"post_attention_layernorm": "ffn_norm"}
    if architecture in ("gemma2", "gemma3"):
        norms = {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.gate_up_proj": "ffn_up",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
        "input_layernorm": "attn_norm", **norms,
    }  # fmt: skip
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def llama_cpp(file: Path, prompts: Sequence[Sequence[int]] = (), texts: Sequence[str] = ()) -> tuple[Any, Any, Any]:
    """Return what llama.cpp makes of ``file``: the log probabilities of the token after each prompt, by id, the token
    ids of each text, and the text of these ids without those that begin every text.

    It runs in a process of its own, as its server has threads that outlive it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, str(file), list(map(list, prompts)), list(texts)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _answer(pipe: Any, file: str, prompts: list[list[int]], texts: list[str]) -> None:
    import requests
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers, params.port = 512, 1, False, 0, 0
    params.cpuparams.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    logprobs = []
    for prompt in prompts:
        # a token of one letter is forced: half a character would have no entry; the values are those before the bias
        body = {
            "prompt": prompt, "n_predict": 1, "n_probs": VOCAB, "temperature": 0, "cache_prompt": False,
            "ignore_eos": True, "logit_bias": [[32, 1000.0]],
        }  # fmt: skip
        reply = server.handle_completions(body)
        reply = json.loads(reply) if isinstance(reply, str) else reply
        entries = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        logprobs.append({entry["id"]: entry["logprob"] for entry in entries})

    def ask(path: str, **body: Any) -> Any:
        return requests.post(f"{server.listening_address}/{path}", json=body).json()

    tokens = [ask("tokenize", content=text, add_special=True)["tokens"] for text in texts]
    first = ask("tokenize", content="", add_special=True)["tokens"]
    decoded = [ask("detokenize", tokens=ids[len(first) :])["content"] for ids in tokens]
    pipe.send((logprobs, tokens, decoded))
