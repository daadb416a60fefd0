"""Generator of ``group_beam_cases.json`` and ``group_processor_cases.json``: diverse beam searches of transformers
4.55, the last release that had them, the latter with logits processors.

    pip install --no-deps --target OLD transformers==4.55.4 tokenizers==0.21.4 huggingface_hub==0.34.4
    PYTHONPATH=OLD python tests/serving/engine/group_beam_cases.py 100 > \
        tests/serving/engine/beams/group_beam_cases.json
    PYTHONPATH=OLD python tests/serving/engine/group_beam_cases.py 60 processors > \
        tests/serving/engine/beams/group_processor_cases.json

``model`` is the same in both releases: its weights are drawn by numpy's legacy generator, whose numbers never change.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import torch
import transformers as tf

VOCAB = 131


def model() -> Any:
    """Return a Llama of two layers with weights that make the next token depend on the context."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    made = tf.LlamaForCausalLM(config).eval().float()
    draw = np.random.RandomState(3)
    with torch.no_grad():
        for _, weight in sorted(made.named_parameters()):
            if weight.dim() > 1:
                weight.copy_(torch.from_numpy(draw.normal(0, 0.4, tuple(weight.shape)).astype(np.float32)))
    made.generation_config.eos_token_id = None  # it would override what a case asks for
    return made


def bias_of(seed: int) -> Any:
    """Return a bias of every token, float32 [VOCAB]: by 0.5 or so, up and down."""
    return np.random.RandomState(seed).normal(0, 0.5, VOCAB).astype(np.float32)


def processors(rng: random.Random, likely: list[int]) -> dict[str, Any]:
    """Return random processor settings of a case; the tokens are likely ones."""
    return {
        "repetition_penalty": rng.choice([1.0, 0.7, 1.3, 2.0]),
        "no_repeat_ngram_size": rng.choice([0, 0, 1, 2, 3]),
        "bad_words": [rng.sample(likely, rng.choice([1, 1, 2])) for _ in range(rng.choice([0, 0, 12]))],
        "min_tokens": rng.choice([0, 0, 2, 5]),
        "bias_seed": rng.choice([None, rng.randint(1, 1000)]),
    }


def as_generate_takes_them(case: dict[str, Any]) -> dict[str, Any]:
    bias = None
    if case["bias_seed"] is not None:
        bias = {(token,): value for token, value in enumerate(bias_of(case["bias_seed"]).tolist())}
    return {
        "repetition_penalty": case["repetition_penalty"],
        "no_repeat_ngram_size": case["no_repeat_ngram_size"],
        "bad_words_ids": case["bad_words"] or None,
        "min_new_tokens": case["min_tokens"] or None,
        "sequence_bias": bias,
    }


@torch.inference_mode()
def case(made: Any, rng: random.Random, *, processed: bool) -> dict[str, Any]:
    """Return a random search and its outcome; its end tokens are likely ones."""
    groups = rng.randint(2, 4)
    width = groups * rng.randint(1, 3)
    prompt = [rng.randint(3, VOCAB - 1) for _ in range(rng.randint(1, 12))]
    ids = torch.tensor([prompt])
    likely = made(ids).logits[0, -1].topk(30).indices.tolist()
    asked = {
        "width": width,
        "num_groups": groups,
        "diversity_penalty": rng.choice([0.3, 1.0, 2.5]),
        "length_penalty": rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0, rng.uniform(-1, 2)]),
        "early_stopping": rng.choice([False, True, "never"]),
        "max_tokens": rng.randint(1, 14),
        "n": rng.randint(1, width),
        "ends": rng.sample(likely, rng.choice([1, 1, 2, 3])),
    }
    more: dict[str, Any] = {"pad_token_id": 0}
    if processed:
        asked |= processors(rng, likely)
        more = {"pad_token_id": asked["ends"][0]} | as_generate_takes_them(asked)  # its own where a model has none
    out = made.generate(
        ids,
        num_beams=width,
        num_beam_groups=groups,
        diversity_penalty=asked["diversity_penalty"],
        num_return_sequences=asked["n"],
        length_penalty=asked["length_penalty"],
        early_stopping=asked["early_stopping"],
        eos_token_id=asked["ends"],
        max_new_tokens=asked["max_tokens"],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    texts = out.sequences[:, len(prompt) :].tolist()
    return asked | {"prompt": prompt, "texts": texts, "scores": out.sequences_scores.tolist()}


if __name__ == "__main__":
    assert tf.__version__.startswith("4.55."), tf.__version__
    tf.logging.set_verbosity_error()
    rng, made = random.Random(1), model()
    processed = sys.argv[2:] == ["processors"]
    print(json.dumps([case(made, rng, processed=processed) for _ in range(int(sys.argv[1]))], separators=(",", ":")))
