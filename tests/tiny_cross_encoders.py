"""Tiny random cross-encoders with their tokenizers, as sentence-transformers' ``CrossEncoder`` loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"w{i}" for i in range(90)]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 1,
    "max_position_embeddings": 66,
}
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
XLMR_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
CONFIGS = {
    "bert": lambda: tf.BertConfig(vocab_size=95, **SIZES),
    "electra": lambda: tf.ElectraConfig(vocab_size=95, embedding_size=64, **SIZES),
    "xlm-roberta": lambda: tf.XLMRobertaConfig(vocab_size=95, pad_token_id=1, type_vocab_size=1, **SIZES),
    "modernbert": lambda: tf.ModernBertConfig(vocab_size=95, pad_token_id=0, local_attention=16, **SIZES),
    "modernbert-mean": lambda: tf.ModernBertConfig(
        vocab_size=95, pad_token_id=0, local_attention=16, classifier_pooling="mean", **SIZES
    ),
    "mpnet": lambda: tf.MPNetConfig(vocab_size=95, **SIZES | {"max_position_embeddings": 68}),
    "deberta": lambda: tf.DebertaV2Config(vocab_size=95, **SIZES),
    "distilbert": lambda: tf.DistilBertConfig(
        vocab_size=95, dim=64, hidden_dim=128, n_layers=2, n_heads=4, num_labels=1, max_position_embeddings=66
    ),
}
PAIRS = [
    ("w1 w2 w3", "w4"),
    ("w5", "w6 w7 w8 w9 w10"),
    ("w1 w2", ""),
    ("w11 w12", "w13 w14 w15"),
    ("w1 w2 w3", " ".join(f"w{i}" for i in range(40))),
]


def save_cross_encoder(
    folder: Path, kind: str = "bert", *, labels: int = 1, max_length: int = 64, templated: bool = False
) -> Path:
    """Save a model of random weights and a tokenizer of ninety words, w0 to w89."""
    torch.manual_seed(1)
    config = CONFIGS[kind]()
    config.num_labels = labels
    model = tf.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # scores far from each other, as trained weights give
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    tokenizer(kind, max_length, templated=templated).save_pretrained(folder)
    return folder


def tokenizer(kind: str, max_length: int, *, templated: bool = False) -> Any:
    """Return the tokenizer; ``templated``: special tokens come from a template, as in transformers 5, and not from the
    family's own post-processor."""
    xlmr = kind == "xlm-roberta"
    special = XLMR_TOKENS if xlmr else BERT_TOKENS
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>" if xlmr else "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if xlmr:
        backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
        names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
        names |= {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    else:
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    if templated:
        begin, end, between = ("<s>", "</s>", "</s>:0 </s>:0") if xlmr else ("[CLS]", "[SEP]", "[SEP]:0")
        second = 0 if xlmr else 1
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0 {end}:0",
            pair=f"{begin}:0 $A:0 {between} $B:{second} {end}:{second}",
            special_tokens=[(token, vocabulary[token]) for token in (begin, end)],
        )
    typed = ["token_type_ids"] if kind in ("bert", "electra") else []
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        model_input_names=["input_ids", *typed, "attention_mask"],
        **names,
    )
