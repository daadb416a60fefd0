"""Tiny random encoders and decoders for the tests of embeddings."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
)

from mlflow_llm.serving.interface.bundle import Bundle, EmbeddingSpec

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS = {
    "bert": lambda: BertModel(BertConfig(**SIZES, max_position_embeddings=40)),
    "roberta": lambda: RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=40)),
    "mpnet": lambda: MPNetModel(MPNetConfig(**SIZES, max_position_embeddings=40)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(**SIZES, max_position_embeddings=40, local_attention=8, pad_token_id=0)
    ),
    "llama": lambda: LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=40)),
    "mistral": lambda: MistralModel(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6, max_position_embeddings=40)
    ),
}
WIDER = {  # multiples of the native kernels' widths, whose packed weights are kept
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}
PACKABLE = {
    "bert": lambda: BertModel(BertConfig(**WIDER)),
    "bert without a pooler": lambda: BertModel(BertConfig(**WIDER), add_pooling_layer=False),
    "roberta": lambda: RobertaModel(RobertaConfig(**WIDER)),
    "mpnet": lambda: MPNetModel(MPNetConfig(**WIDER)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(**WIDER, local_attention=8, pad_token_id=0),
    ),
    "llama": lambda: LlamaModel(LlamaConfig(**WIDER, num_key_value_heads=2)),
}


def saved(folder, kind):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    model.save_pretrained(folder)
    return model


def bundle_of(folder, **spec):
    return Bundle(
        content_hash="x",
        tasks=("embeddings",),
        model_dir=str(folder),
        tokenizer_dir="",
        embedding=EmbeddingSpec(**spec),
    )
