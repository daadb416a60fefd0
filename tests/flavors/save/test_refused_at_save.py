"""Models and settings that no engine would run: refused when saved, by name, with nothing left."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import transformers as tf
from flavor_models import byte_tokenizer
from mlflow.models import Model
from safetensors.torch import save_file

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model.bundle_reader import configured, read_bundle
from mlflow_llm.flavors.llm.save import encoder_trial
from mlflow_llm.flavors.llm.save.first_layers import FirstLayers, write_first_layers
from mlflow_llm.serving.engine.assembly import assemble
from mlflow_llm.serving.interface.errors import PackagingError

SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def save_encoder(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def refused(path: Path, *args: Any, **options: Any) -> str:
    """Return the message of a save that is refused."""
    with pytest.raises(PackagingError) as caught:
        llm.save_model(path, *args, **options)
    assert not path.exists()
    return str(caught.value)


IN_THE_ENGINES_WORDS = [
    ({"quantization": "int4"}, "quantization: 'int4' is not allowed; expected 'none' or 'int8'"),
    ({"max_model_len": 4096}, "max_model_len: 4096 is not allowed; expected at most 256"),
]


@pytest.mark.parametrize(("settings", "words"), IN_THE_ENGINES_WORDS)
def test_settings_that_no_engine_runs_are_refused(tmp_path, llama_dir, settings, words):
    """A save refuses what an engine would, also for settings in ``model_config``."""
    said = refused(tmp_path / "m", llama_dir, **settings)
    assert said.startswith(words)
    assert refused(tmp_path / "m", llama_dir, model_config=settings) == said
    llm.save_model(tmp_path / "n", llama_dir)
    bundle, config = configured(tmp_path / "n", {**settings, "device": "cpu"})
    with pytest.raises(PackagingError) as caught:
        assemble(bundle, config.settings)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: 'int8' is not allowed; expected 'auto'"),
        ({"kv_block_size": 16}, "kv_block_size: 16 is not allowed; expected null"),
        ({"draft_model": "small"}, "draft_model: small is not allowed; expected null"),
        ({"quantization": "int4"}, "quantization: 'int4' is not allowed; expected 'none' or 'int8'"),
    ],
)
def test_settings_of_generating_models_are_refused_for_embeddings(tmp_path, bert_dir, settings, words):
    """An embedding model is refused with settings of generating models."""
    assert refused(tmp_path / "m", bert_dir, **settings).startswith(words)


@pytest.mark.parametrize(
    "settings",
    [{"quantization": "fp8"}, {"kv_block_size": 16}, {"kv_cache_dtype": "int8"}, {"device": "cuda:7"}],
    ids=str,
)
def test_settings_that_another_machine_may_support_are_saved(tmp_path, llama_dir, settings):
    """Settings that only this machine lacks support for are saved."""
    llm.save_model(tmp_path / "m", llama_dir, **settings)
    assert configured(tmp_path / "m")[0].tasks == ("chat", "completions")


def test_invalid_draft_models_are_refused(tmp_path, llama_dir, bert_dir):
    """A missing draft model, an embedding model and a file are refused; a directory, logged or not, is saved."""
    assert "draft_model: there is no directory '/nope'" in refused(tmp_path / "m", llama_dir, draft_model="/nope")
    llm.save_model(tmp_path / "bert", bert_dir)
    said = refused(tmp_path / "m", llama_dir, draft_model=str(tmp_path / "bert"))
    assert said.endswith("does embeddings; expected a model that writes text")
    (tmp_path / "file").touch()
    assert " is a file; expected a model's" in refused(tmp_path / "m", llama_dir, draft_model=str(tmp_path / "file"))
    llm.save_model(tmp_path / "small", llama_dir)
    for number, uri in enumerate((llama_dir, tmp_path / "small")):
        llm.save_model(tmp_path / str(number), llama_dir, draft_model=str(uri))
        assert configured(tmp_path / str(number))[1].settings.draft_model == str(uri)


def test_arguments_without_effect_are_refused(tmp_path, llama_dir, bert_dir):
    """A revision without a hub id, and embedding settings of a generating model, are refused."""
    words = "revision: 'main' is not allowed; expected None: the model is not a hub id"
    assert refused(tmp_path / "m", llama_dir, revision="main") == words
    model = tf.AutoModel.from_pretrained(bert_dir)
    assert refused(tmp_path / "m", model, byte_tokenizer(), revision="main") == words
    said = refused(tmp_path / "m", llama_dir, embedding={"pooling": "mean"})
    assert said.endswith("is not allowed; expected None: the model answers chat, completions")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"signature": "x"}, "signature: 'x' is not allowed; expected an mlflow.models.ModelSignature, or None"),
        ({"signature": {}}, "signature: {} is not allowed"),
        ({"mlflow_model": "x"}, "mlflow_model: 'x' is not allowed"),
        ({"metadata": [1]}, "metadata: [1] is not allowed; expected a dict, or None"),
        ({"metadata": {"f1": 1j}}, "metadata: 'f1': 1j is not allowed; expected texts, numbers"),
        ({"pip_requirements": 3}, "pip_requirements: 3 is not allowed; expected a list of requirements"),
        ({"extra_pip_requirements": [3]}, "extra_pip_requirements: [3] is not allowed"),
        ({"code_paths": "x.py"}, "code_paths: 'x.py' is not allowed; expected a list of local files and folders"),
        ({"code_paths": [3]}, "code_paths: [3] is not allowed"),
        ({"link_files": "no"}, "link_files: 'no' is not allowed; expected True or False"),
        ({"validate_serving_input": 1}, "validate_serving_input: 1 is not allowed; expected True or False"),
        ({"input_example": {"prompt": 1j}}, "input_example: Object of type complex is not JSON serializable"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_arguments_of_another_type(tmp_path, llama_dir, given, words):
    """Arguments of a wrong type are refused by name."""
    assert refused(tmp_path / "m", llama_dir, **given).startswith(words)


@pytest.mark.parametrize("path", [None, 3, b"m"], ids=str)
def test_a_path_of_another_type(llama_dir, path):
    """A path of a wrong type is refused by name."""
    with pytest.raises(PackagingError, match=r"path: .* is not allowed; expected a local directory"):
        llm.save_model(path, llama_dir)


def test_metadata_of_numpy(tmp_path, store, llama_dir):
    """Metadata of numpy values, as evaluations return them, is saved as numbers and lists."""
    given = {"f1": np.float64(0.5), "counts": [np.int64(3)], "vector": np.arange(2)}
    expected = {"f1": 0.5, "counts": [3], "vector": [0, 1], "task": "llm/v1/chat"}
    llm.save_model(tmp_path / "m", llama_dir, metadata=given)
    assert Model.load(str(tmp_path / "m")).metadata == expected
    assert llm.log_model(llama_dir, name="m", metadata=given).metadata == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(
            (name, f"model_config: '{name}' is not a setting")
            for name in ("flavor", "path", "mlflow_model", "flavor_name")
        ),
    ],
    ids=str,
)
def test_arguments_that_log_model_lacks(store, llama_dir, name, words):
    """Unknown arguments of log_model are refused instead of passed to MLflow, and nothing is logged."""
    with pytest.raises(PackagingError) as caught:
        llm.log_model(llama_dir, **{"name": "m", name: "x"})
    assert str(caught.value).startswith(words)
    assert mlflow.search_logged_models(output_format="list") == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_model_len": 4096}, "max_model_len: 4096 is not allowed; expected at most 256"),
        ({"draft_model": "/nope"}, "draft_model: there is no directory '/nope'"),
        ({"embedding": {"pooling": "mean"}}, "embedding: {'pooling': 'mean'} is not allowed with base="),
        ({"revision": "main"}, "revision: 'main' is not allowed with base="),
    ],
)
def test_adapters_over_a_base(tmp_path, store, llama_dir, adapter_dir, given, words):
    """Adapters over a base are refused with the same messages."""
    llm.log_model(llama_dir, name="b", registered_model_name="assistant")
    options = {"base": "models:/assistant/1", "adapters": {"formal": adapter_dir}}
    assert refused(tmp_path / "m", **options, **given).startswith(words)


def mpnet(pad_token_id: int, layers: int = SIZES["num_hidden_layers"]) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": layers}
    return tf.MPNetModel(tf.MPNetConfig(**sizes, pad_token_id=pad_token_id))


def test_a_large_encoder_is_tried_by_its_first_layers(tmp_path, monkeypatch, caplog):
    """An encoder that is too large to be tried as a whole is tried by its first layers, and stored as it was."""
    few = sum(parameter.numel() for parameter in mpnet(1, layers=2).parameters())
    monkeypatch.setattr(encoder_trial, "MAX_TRIAL_PARAMETERS", few)
    said = refused(tmp_path / "m", save_encoder(tmp_path / "wrong", mpnet(0, layers=6)))
    assert said.startswith("model: this model is not supported for embeddings: packed result differs by")
    source = save_encoder(tmp_path / "right", mpnet(1, layers=6))
    (source / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (source / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_cls_token": True}
    (source / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with caplog.at_level(logging.INFO):
        llm.save_model(tmp_path / "m", source)
    assert "its first 2 layers are tried, the whole by the engine" in caplog.text
    assert "UNEXPECTED" not in caplog.text
    stored = tmp_path / "m"
    assert (stored / "model/config.json").read_bytes() == (source / "config.json").read_bytes()
    assert sorted(file.name for file in stored.glob("tmp*")) == []
    assert tf.AutoModel.from_pretrained(stored / "model").config.num_hidden_layers == 6


def test_the_first_layers_have_each_kind_of_attention(tmp_path):
    """A list with an entry for every layer is cut too."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 3
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tf.Gemma3TextConfig(**sizes, head_dim=16, num_hidden_layers=7, vocab_size=300, layer_types=kinds)
    save_encoder(tmp_path / "gemma", tf.Gemma3TextModel(config))
    written = write_first_layers(tf.AutoModel, tmp_path / "gemma", tmp_path / "cut", 10**9)
    assert written == FirstLayers(layers=4, tokens=None)
    cut = tf.AutoModel.from_pretrained(tmp_path / "cut")
    assert cut.config.layer_types == kinds[:4]
    assert len(cut.layers) == 4
    assert write_first_layers(tf.AutoModel, tmp_path / "gemma", tmp_path / "none", 10) is None


def wide_mpnet(pad_token_id: int, words: int = 3000) -> Any:
    torch.manual_seed(0)
    return tf.MPNetModel(tf.MPNetConfig(**SIZES | {"vocab_size": words}, pad_token_id=pad_token_id))


@pytest.mark.parametrize("layers", [2, 1])
def test_a_large_table_of_tokens_is_cut(tmp_path, monkeypatch, caplog, layers):
    """An encoder whose first layers are too large is tried with a part of its tokens, and stored whole."""
    size = sum(parameter.numel() for parameter in wide_mpnet(1, 1024).parameters())
    one = sum(parameter.numel() for parameter in wide_mpnet(1).encoder.layer[0].parameters())
    monkeypatch.setattr(encoder_trial, "MAX_TRIAL_PARAMETERS", size - (2 - layers) * one)
    wrong = save_encoder(tmp_path / "wrong", wide_mpnet(0))
    assert "packed result differs by" in refused(tmp_path / "m", wrong)
    right = save_encoder(tmp_path / "right", wide_mpnet(1))
    with caplog.at_level(logging.INFO):
        llm.save_model(tmp_path / "m", right)
    assert f"its first {layers} layers with 1024 tokens are tried" in caplog.text
    assert tf.AutoModel.from_pretrained(tmp_path / "m/model").get_input_embeddings().weight.shape[0] == 3000


def test_padding_beyond_the_tokens_that_are_tried(tmp_path):
    """A table that is cut has its padding at its end when the model's own is beyond it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tf.Qwen3Config(**sizes, head_dim=16, num_hidden_layers=3, vocab_size=5000, pad_token_id=4999)
    model = tf.Qwen3Model(config)
    save_encoder(tmp_path / "qwen", model)
    limit = sum(parameter.numel() for parameter in model.layers[:2].parameters()) + 1100 * 32
    written = write_first_layers(tf.AutoModel, tmp_path / "qwen", tmp_path / "cut", limit)
    assert written == FirstLayers(layers=2, tokens=1024)
    cut = tf.AutoModel.from_pretrained(tmp_path / "cut")
    assert (cut.config.pad_token_id, *cut.get_input_embeddings().weight.shape) == (1023, 1024, 32)
    assert torch.equal(cut.embed_tokens.weight[:1000], model.embed_tokens.weight[:1000].to(cut.dtype))


def test_modules_that_do_not_fit_a_model_too_large_to_be_tried(tmp_path, monkeypatch):
    """A module after pooling for vectors of another size is refused, also if not even one layer can be tried."""
    monkeypatch.setattr(encoder_trial, "MAX_TRIAL_PARAMETERS", 1)
    source = save_encoder(tmp_path / "source", mpnet(1))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (source / "modules.json").write_text(json.dumps(entries))
    for folder, config in (
        ("1_Pooling", {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_mean_tokens": True}),
        ("2_Dense", {"in_features": 99, "out_features": 5, "bias": False, "activation_function": "torch.nn.Tanh"}),
    ):
        (source / folder).mkdir()
        (source / folder / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": torch.zeros(5, 99)}, source / "2_Dense" / "model.safetensors")
    assert "2_Dense" in refused(tmp_path / "m", source)


def test_encoders_that_run_wrong(tmp_path, monkeypatch):
    """Encoders that cannot run or give wrong vectors are refused; a large one is left to the engine to check."""
    deberta = save_encoder(tmp_path / "deberta", tf.DebertaV2Model(tf.DebertaV2Config(**SIZES)))
    said = refused(tmp_path / "m", deberta)
    assert said == "model: DebertaV2Model is not supported for embeddings: its attention cannot be replaced"
    llm.save_model(tmp_path / "right", save_encoder(tmp_path / "one", mpnet(1)))
    other = save_encoder(tmp_path / "zero", mpnet(0))
    said = refused(tmp_path / "m", other)
    assert said.startswith("model: this model is not supported for embeddings: packed result differs by")
    monkeypatch.setattr(encoder_trial, "MAX_TRIAL_PARAMETERS", 1)
    llm.save_model(tmp_path / "large", other)


def test_a_failed_trial_does_not_refuse_the_model(tmp_path, bert_dir, monkeypatch, caplog):
    """A trial that fails for lack of a package is logged and the model saved, since the serving machine may have it."""

    def lacking(*_: Any) -> None:
        raise ImportError("no package of that name here")

    monkeypatch.setattr("mlflow_llm.serving.engine.models.embedder.load_embedder", lacking)
    with caplog.at_level(logging.DEBUG):
        llm.save_model(tmp_path / "m", bert_dir)
    assert "only the engine tries the model: no package of that name here" in caplog.text


def bert(kind: str, labels: int = 2) -> Any:
    torch.manual_seed(0)
    return getattr(tf, f"BertFor{kind}")(tf.BertConfig(**SIZES, num_labels=labels))


@pytest.mark.parametrize(
    ("kind", "labels", "head"),
    [
        ("SequenceClassification", 3, "a head of 3 labels"),
        ("SequenceClassification", 2, "a head of 2 labels"),
        ("TokenClassification", 3, "a head"),
        ("QuestionAnswering", 2, "a head"),
        ("NextSentencePrediction", 2, "a head"),
    ],
)
def test_a_head_that_no_task_uses(tmp_path, kind, labels, head):
    """A model with a head that no task uses is refused by its name, unless its task is embeddings."""
    source = save_encoder(tmp_path / "source", bert(kind, labels))
    words = f"task: BertFor{kind} has {head} that no task uses; task='embeddings' logs its encoder without it"
    assert refused(tmp_path / "m", source) == words
    llm.save_model(tmp_path / "m", source, task="embeddings")
    assert read_bundle(tmp_path / "m").tasks == ("embeddings",)


@pytest.mark.parametrize("kind", ["MaskedLM", "PreTraining"])
def test_an_encoder_as_it_was_trained(tmp_path, kind, caplog):
    """An encoder as it was pretrained is an embedding model, with a warning unless the task was given."""
    source = save_encoder(tmp_path / "source", bert(kind))
    llm.save_model(tmp_path / "m", source)
    assert read_bundle(tmp_path / "m").tasks == ("embeddings",)
    assert f"BertFor{kind} is logged as an embedding model, by the mean of its token vectors" in caplog.text
    caplog.clear()
    llm.save_model(tmp_path / "n", source, task="embeddings")
    assert "is logged as an embedding model" not in caplog.text


def test_a_tokenizer_without_a_fast_form(tmp_path: Path) -> None:
    """One that is written in Python alone fails now, not at the first request."""
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, "vocab_size": 400}))
    with pytest.raises(mlflow.MlflowException, match=r"tokenizer: ByT5Tokenizer has no fast form \(tokenizer.json\)"):
        llm.save_model(tmp_path / "m", model=model, tokenizer=tf.ByT5Tokenizer())
    assert not (tmp_path / "m").exists()
