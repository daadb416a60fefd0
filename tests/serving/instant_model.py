"""A bundle for the engine that needs no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlflow_llm.serving.interface.bundle import Bundle

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # a character's id is its place
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_instant_model(root: Path, **model: float) -> Bundle:
    """Write a model for ``InstantEngine`` into ``root``, with a 259-token byte tokenizer and no weights; return its
    bundle.
    """
    vocab = {c: i for i, c in enumerate(ALPHABET)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(root / "tokenizer")
    (root / "model").mkdir(parents=True)
    (root / "model" / "instant.json").write_text(json.dumps({"vocab_size": len(tokenizer), **model}))
    return Bundle(
        content_hash=f"instant-{root.name}",
        tasks=("chat", "completions", "embeddings"),
        model_dir=str(root / "model"),
        tokenizer_dir=str(root / "tokenizer"),
        adapters={"pirate": str(root / "model")},
    )
