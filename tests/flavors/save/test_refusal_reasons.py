"""Refusals name the true reason, and a model that would end its engine is refused when it is logged."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from flavor_models import byte_tokenizer
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.serving.engine.models import embedder
from mlflow_llm.serving.engine.models.attention_probe import refuse_attention

SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONVOLUTIONS = {
    "conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
REFUSED = {
    "doge": (lambda: tf.DogeForCausalLM(tf.DogeConfig(**SIZES)), "DogeAttention makes an attention mask of its own"),
    "mamba": (
        lambda: tf.MambaForCausalLM(tf.MambaConfig(vocab_size=272, hidden_size=32, num_hidden_layers=2, state_size=4)),
        "MambaForCausalLM is not supported: it keeps a recurrent state",
    ),
    "mamba, embedder": (
        lambda: tf.MambaModel(tf.MambaConfig(vocab_size=272, hidden_size=32, num_hidden_layers=2, state_size=4)),
        "MambaModel is not supported for embeddings: it keeps a recurrent state",
    ),
    "wav2vec2": (
        lambda: tf.Wav2Vec2Model(tf.Wav2Vec2Config(vocab_size=272, **SMALL, **CONVOLUTIONS)),
        "it reads input_values, not the tokens of a text",
    ),
    "vit": (lambda: tf.ViTModel(tf.ViTConfig(**SMALL)), "it reads pixel_values, not the tokens of a text"),
    "clip": (
        lambda: tf.CLIPModel(
            tf.CLIPConfig(
                text_config=SIZES, vision_config=SMALL | {"image_size": 32, "patch_size": 16}, projection_dim=16
            )
        ),
        "it has no single table of token vectors",
    ),
}


def save(folder, model):
    torch.manual_seed(0)
    model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_the_reason_is_the_models_own(tmp_path, kind):
    """An unused default, a missing attention and an input that is no text are not confused with one another."""
    model, said = REFUSED[kind]
    with pytest.raises(MlflowException, match=said):
        llm.save_model(tmp_path / "m", save(tmp_path / "source", model))


def test_any_error_of_the_trial_is_a_refusal(tmp_path, bert_dir, monkeypatch):
    """An encoder whose code or whose check fails with any error is refused: its engine would end with that error."""

    def broken(*args):
        raise AttributeError("no attribute pad_token_id")

    monkeypatch.setattr(embedder, "use_ragged_attention", broken)
    with pytest.raises(MlflowException, match="BertModel cannot be run: AttributeError: no attribute pad_token_id"):
        llm.save_model(tmp_path / "m", bert_dir)


@pytest.mark.parametrize("error", [ImportError, MemoryError])
def test_what_this_machine_lacks_is_left_to_the_engine(tmp_path, bert_dir, monkeypatch, caplog, error):
    """A missing package or too little memory does not refuse the model; a warning says that it was not tried."""

    def lacking(*args):
        raise error("not here")

    monkeypatch.setattr(embedder, "use_ragged_attention", lacking)
    llm.save_model(tmp_path / "m", bert_dir)
    assert "only the engine tries the model: not here" in caplog.text


def test_the_probe_leaves_a_model_as_it_was():
    """A decoder whose attention is known passes, and attends as before."""
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SIZES), attn_implementation="eager")
    refuse_attention(model)
    assert model.config._attn_implementation == "eager"
