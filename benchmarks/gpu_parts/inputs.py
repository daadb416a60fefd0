"""Weights of Llama's shapes, a tokenizer and adapters for them: random, made once in a folder, and found there again.

What a token costs does not depend on what the weights are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .plan import Plan, Record

SIZES: dict[str, dict[str, int]] = {  # Llama 3.2 1B and 3B, Llama 3.1 8B, and one for trying this out
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
             "vocab_size": 500},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192},
    "3b": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "intermediate_size": 8192},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
}  # fmt: skip
RANK = 16
ADAPTERS = tuple(f"adapter-{i}" for i in range(8))


def config_of(size: str) -> Any:
    from transformers import LlamaConfig

    common = {"vocab_size": 128256, "num_key_value_heads": 2 if size == "tiny" else 8, "max_position_embeddings": 4096}
    return LlamaConfig(**{**common, **SIZES[size]}, tie_word_embeddings=size != "8b", eos_token_id=None)


def config_in(plan: Plan) -> Any:
    """Return the configuration of the plan's model: of its checkpoint, if it has been made."""
    from transformers import AutoConfig

    made = (plan.model_dir / "config.json").is_file()
    return AutoConfig.from_pretrained(plan.model_dir) if made else config_of(plan.size)


def make(plan: Plan) -> Iterator[Record]:
    """Make what ``plan`` needs and its folder lacks."""
    if not any(plan.model_dir.glob("*.safetensors")):
        make_weights(plan.size, plan.device, plan.model_dir)
    if {"features", "http"} & {*plan.parts} and not plan.tokenizer_dir.is_dir():
        make_tokenizer(vocab_of(plan), plan.tokenizer_dir)
    if "features" in plan.parts and not plan.adapters_dir.is_dir():
        make_adapters(plan.model_dir, plan.adapters_dir)
    yield {"part": "inputs", "model": plan.model_dir.name}


def vocab_of(plan: Plan) -> int:
    return int(json.loads((plan.model_dir / "config.json").read_text())["vocab_size"])


def make_weights(size: str, device: str, folder: Path) -> None:
    """Save random weights in bfloat16 (float32 on CPU) as a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def make_tokenizer(vocab: int, folder: Path) -> None:
    """Save a tokenizer in which each of ``vocab`` tokens has a text: bytes first, then short words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*alphabet, *(word(number) for number in range(vocab - len(alphabet)))]
    backend = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(texts)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def word(number: int) -> str:
    """Return a text of at least two characters that no other number has: digits where JSON may continue by them."""
    if number % 4 == 0:
        return f"1{number // 4}"
    letters = ""
    while number:
        number, place = divmod(number, 26)
        letters += chr(97 + place)
    return f"Ġ{letters}"


def make_adapters(model_dir: Path, folder: Path) -> None:
    """Save adapters in peft's layout on every linear layer but the head."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model_dir / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys), "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none",
        "target_modules": [name.partition(".")[2] for name in shapes], "base_model_name_or_path": "",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for name in ADAPTERS:
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for module, (width, out) in shapes.items():
                key = f"base_model.model.model.layers.{layer}.{module}"
                for part, shape in (("lora_A", (RANK, width)), ("lora_B", (out, RANK))):
                    tensors[f"{key}.{part}.weight"] = torch.randn(shape, generator=generator).mul_(0.02)
        (folder / name).mkdir(parents=True)
        save_file(tensors, folder / name / "adapter_model.safetensors")
        (folder / name / "adapter_config.json").write_text(json.dumps(described))


def prompts(vocab: int, count: int, length: int, first: int = 0) -> list[tuple[int, ...]]:
    """Return prompts of different tokens, so that none has another's prefix; ``first``: the number of the first."""
    return [
        tuple((i * 7919 + j * 104729 + 3) % (vocab - 3) + 3 for j in range(length)) for i in range(first, first + count)
    ]
