"""Directories that sentence-transformers has saved: vectors equal to the library's own, or a refusal by name."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from flavor_models import byte_tokenizer, tiny_llama
from mlflow.exceptions import MlflowException
from transformers import AutoModel

from mlflow_llm.flavors import llm
from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.tasks.prompt.text import TextModel

st = pytest.importorskip("sentence_transformers")
parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
TEXTS = ["the quick brown fox", "a", "  two  spaces, and Ünïcode ", "jumps over the lazy dog and runs away " * 3]


@pytest.fixture(scope="module")
def encoder(bert_dir):
    """Return the library's model of a plain encoder: transformer and pooling."""
    return st.SentenceTransformer(str(bert_dir), device="cpu")


def built(encoder, *after, pooling="mean", **options):
    """Return a model of the library: the encoder's transformer, pooling, and further modules."""
    torch.manual_seed(3)
    return st.SentenceTransformer(modules=[encoder[0], parts.Pooling(32, pooling), *after], device="cpu", **options)


def dense(size_in, size_out, **options):
    torch.manual_seed(5)
    return parts.Dense(size_in, size_out, **options)


def layer_norm(size):
    torch.manual_seed(6)
    found = parts.LayerNorm(size)
    torch.nn.init.normal_(found.norm.weight)
    torch.nn.init.normal_(found.norm.bias)
    return found


def embedded(folder, texts=TEXTS):
    """Return the vectors of a saved model, computed in this process."""
    bundle = llm.load_bundle(folder)
    text = TextModel(bundle)
    embedder = load_embedder(bundle, EngineSettings())
    ids = [tokens for tokens, _ in text.encode_embeddings(texts, embedder.max_length)]
    return embedder.embed(ids)


def vectors(folder, texts=TEXTS):
    """Return the vectors of a saved model as its callers get them."""
    with llm.load_model(str(folder)) as model:
        return np.array(model.embed(texts))


def agree(library, tmp_path, texts=TEXTS, how=embedded):
    """Save ``library``, log the directory and compare the vectors of ``texts``."""
    library.save(str(tmp_path / "saved"))
    own = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(texts)
    llm.save_model(tmp_path / "m", tmp_path / "saved")
    found = how(tmp_path / "m", texts)
    assert found.shape == own.shape
    assert np.allclose(found, own, atol=2e-5), np.abs(found - own).max()


MODELS = {
    "normalised": lambda e: built(e, parts.Normalize()),
    "two poolings": lambda e: built(e, pooling=("cls", "max")),
    "three poolings, dense": lambda e: built(e, dense(96, 20), pooling=("weightedmean", "mean", "lasttoken")),
    "dense, tanh": lambda e: built(e, dense(32, 24)),
    "EmbeddingGemma's": lambda e: built(
        e,
        dense(32, 64, bias=False, activation_function=torch.nn.Identity()),
        dense(64, 32, bias=False, activation_function=torch.nn.Identity()),
        parts.Normalize(),
    ),
    "dense with its input": lambda e: built(e, dense(32, 32, use_residual=True, activation_function=torch.nn.GELU())),
    "dense, projected input": lambda e: built(e, dense(32, 12, use_residual=True, activation_function=torch.nn.ReLU())),
    "normalised before": lambda e: built(e, parts.Normalize(), dense(32, 8)),
    "norm and dropout": lambda e: built(e, parts.Dropout(0.5), layer_norm(32), parts.Normalize()),
    "truncated": lambda e: built(e, truncate_dim=10),
    "normalised, truncated": lambda e: built(e, dense(32, 24), parts.Normalize(), truncate_dim=7),
}


@pytest.mark.parametrize("kind", MODELS)
def test_saved_modules_give_the_librarys_vectors(tmp_path, encoder, kind):
    """Poolings, dense layers, norms, truncation and default prompts are those that the library would apply."""
    agree(MODELS[kind](encoder), tmp_path)


def test_the_default_prompt_is_put_before_a_text(tmp_path, encoder):
    """A request without an instruction gets the prompt that ``default_prompt_name`` names."""
    prompts = {"query": "find: ", "document": ""}
    agree(built(encoder, prompts=prompts, default_prompt_name="query"), tmp_path, how=vectors)


@pytest.mark.parametrize("mode", parts.Pooling.POOLING_MODES)
def test_each_pooling_mode(tmp_path, encoder, mode):
    """Each pooling mode as the library computes it."""
    agree(built(encoder, pooling=mode), tmp_path)


def test_a_plain_encoder_is_taken_as_the_library_takes_it(tmp_path, bert_dir, encoder, caplog):
    """Without the library's files: the mean as it is, with a line in the log; ``normalize`` gives length 1."""
    with caplog.at_level(logging.INFO):
        llm.save_model(tmp_path / "m", bert_dir)
    assert "not scaled to length 1" in caplog.text
    assert np.allclose(embedded(tmp_path / "m"), encoder.encode(TEXTS), atol=2e-5)
    llm.save_model(tmp_path / "n", bert_dir, embedding={"normalize": True})
    assert np.allclose(embedded(tmp_path / "n"), encoder.encode(TEXTS, normalize_embeddings=True), atol=2e-5)


def test_a_plain_causal_model_is_taken_as_the_library_takes_it(tmp_path):
    """A causal language model gives its last token's vector, its headless form the mean, as in the library."""
    for name, model in (("whole", tiny_llama()), ("headless", tiny_llama().model)):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        own = st.SentenceTransformer(str(tmp_path / name), device="cpu").encode(TEXTS)
        llm.save_model(tmp_path / f"{name} m", tmp_path / name, task="embeddings")
        assert np.allclose(embedded(tmp_path / f"{name} m"), own, atol=2e-5)


def test_the_length_limit_is_the_tokenizers(tmp_path, encoder):
    """From 6.0 on the limit is the tokenizer's ``model_max_length``: a longer text is refused, or cut as the library
    cuts it."""
    library = built(encoder)
    before = library.max_seq_length
    try:
        library.max_seq_length = 20
        library.save(str(tmp_path / "saved"))
    finally:
        library.max_seq_length = before
    llm.save_model(tmp_path / "m", tmp_path / "saved")
    long = TEXTS[-1]
    with llm.load_model(str(tmp_path / "m")) as model:
        with pytest.raises(MlflowException, match="more than 20 tokens"):
            model.embed([long])
        cut = np.array(model.embed([long], error_behavior="truncate"))
    assert np.allclose(cut, st.SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode([long]), atol=2e-5)


def test_a_cut_vector_keeps_what_dimensions_means(tmp_path, encoder):
    """``dimensions`` goes up to ``truncate_dim``, which the reply has without it."""
    built(encoder, truncate_dim=10).save(str(tmp_path / "saved"))
    llm.save_model(tmp_path / "m", tmp_path / "saved")
    assert embedded(tmp_path / "m").shape == (len(TEXTS), 10)
    with llm.load_model(str(tmp_path / "m")) as model:
        assert np.array(model.embed(TEXTS, dimensions=4)).shape == (len(TEXTS), 4)
        with pytest.raises(MlflowException, match=r"dimensions.*\[1, 10\]"):
            model.embed(TEXTS, dimensions=11)


def write(folder, name, **fields):
    file = folder / name
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | fields))


def saved_bert(encoder, tmp_path):
    folder = tmp_path / "saved"
    built(encoder, dense(32, 32), parts.Normalize()).save(str(folder))
    return folder


CHANGES = {
    "transformer_task fill-mask": ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask"),
    "message": (
        "sentence_bert_config.json",
        {"modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}, "message": {}}},
        "modality_config has 'message'",
    ),
    "pooler": (
        "sentence_bert_config.json",
        {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
        "pooler_output",
    ),
    "no text": ("sentence_bert_config.json", {"modality_config": {"image": {}}}, "reads no text"),
    "output": ("sentence_bert_config.json", {"module_output_name": "sentence_embedding"}, "module_output_name"),
    "query_length": ("sentence_bert_config.json", {"query_length": 32}, "query_length"),
    "special tokens": (
        "sentence_bert_config.json",
        {"processing_kwargs": {"text": {"add_special_tokens": False}}},
        "processing_kwargs.text.add_special_tokens",
    ),
    "model options": ("sentence_bert_config.json", {"config_kwargs": {"is_causal": True}}, "config_kwargs.is_causal"),
    "old options": ("sentence_bert_config.json", {"tokenizer_args": {"do_lower": True}}, "processor_kwargs.do_lower"),
    "sparse": ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
    "unknown default": ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "default_prompt_name"),
    "truncate_dim": ("config_sentence_transformers.json", {"truncate_dim": 33}, "truncate_dim: 33"),
    "include_prompt": ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
    "activation": ("2_Dense/config.json", {"activation_function": "mine.Activation"}, "mine.Activation"),
    "token vectors": ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
    "normalised tokens": ("3_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_would_change_a_vector_is_refused_by_name(tmp_path, encoder, kind):
    """Each entry of the files that the engine does not follow is named when the model is logged."""
    name, fields, said = CHANGES[kind]
    folder = saved_bert(encoder, tmp_path)
    write(folder, name, **fields)
    with pytest.raises(MlflowException, match=said.replace("[", r"\[")):
        llm.save_model(tmp_path / "m", folder)


def test_dense_weights_of_another_size_are_refused(tmp_path, encoder):
    """A dense layer that does not fit the vector is refused when the model is logged, not when its engine starts."""
    built(encoder, dense(16, 8)).save(str(tmp_path / "saved"))
    with pytest.raises(MlflowException, match=r"2_Dense: linear\.weight has shape \(8, 16\); expected \(8, 32\)"):
        llm.save_model(tmp_path / "m", tmp_path / "saved")


def test_code_of_the_models_own_is_refused_by_class(tmp_path, encoder):
    """A module that is named Transformer but is the repository's own code is refused, and so are foreign folders."""
    folder = saved_bert(encoder, tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"type": "custom_st.Transformer"}, *modules[1:]]))
    with pytest.raises(MlflowException, match=r"custom_st\.Transformer"):
        llm.save_model(tmp_path / "m", folder)
    (folder / "modules.json").write_text(json.dumps([*modules[:2], modules[2] | {"path": "../2_Dense"}, modules[3]]))
    with pytest.raises(MlflowException, match="leaves the model's directory"):
        llm.save_model(tmp_path / "m", folder)


def other_modules(encoder, tmp_path):
    """Return every other module that the library has, in a model of its own."""
    words = tmp_path / "words.txt"
    words.write_text("the 0.1 0.2\nfox 0.3 0.4\n")
    tokenizer = encoder.tokenizer.backend_tokenizer
    return {
        "WeightedLayerPooling": [encoder[0], parts.WeightedLayerPooling(32, 2), parts.Pooling(32)],
        "CNN": [encoder[0], parts.CNN(32, 8), parts.Pooling(24)],
        "LSTM": [encoder[0], parts.LSTM(32, 8), parts.Pooling(16)],
        "BoW": [parts.BoW(["the", "fox"])],
        "WordEmbeddings": [parts.WordEmbeddings.from_text_file(str(words)), parts.Pooling(2)],
        "WordWeights": [encoder[0], parts.WordWeights(["the"], {"the": 0.5}), parts.Pooling(32)],
        "StaticEmbedding": [parts.StaticEmbedding(tokenizer, embedding_dim=8)],
        "Router": [parts.Router.for_query_document([encoder[0]], [encoder[0]]), parts.Pooling(32)],
    }


@pytest.mark.parametrize(
    "kind",
    ["WeightedLayerPooling", "CNN", "LSTM", "BoW", "WordEmbeddings", "WordWeights", "StaticEmbedding", "Router"],
)
def test_other_modules_are_refused_by_name(tmp_path, encoder, kind):
    """Modules that the engine does not run are named when the model is logged."""
    modules = other_modules(encoder, tmp_path)[kind]
    st.SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    with pytest.raises(MlflowException, match=f"modules .*{kind}.* are not supported"):
        llm.save_model(tmp_path / "m", tmp_path / "saved")


def test_quantised_linears_leave_the_dense_layers(tmp_path, encoder):
    """``quantize="int8"`` stores the transformer's linears in eight bits and the modules after pooling as they came."""
    library = built(encoder, dense(32, 16), parts.Normalize())
    library.save(str(tmp_path / "saved"))
    llm.save_model(tmp_path / "m", tmp_path / "saved", quantize="int8")
    cosines = (embedded(tmp_path / "m") * library.encode(TEXTS)).sum(-1)
    assert cosines.min() > 0.99


def test_gemma3_text_in_both_directions(tmp_path):
    """EmbeddingGemma's form: a bidirectional Gemma 3 with windows, two dense layers and a normalisation."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8, sliding_window=6, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], max_position_embeddings=256,
    )  # fmt: skip
    Gemma3TextModel(config).save_pretrained(tmp_path / "gemma")
    byte_tokenizer().save_pretrained(tmp_path / "gemma")
    transformer = st.SentenceTransformer(str(tmp_path / "gemma"), device="cpu")
    plain = torch.nn.Identity()
    library = built(
        transformer,
        dense(32, 64, bias=False, activation_function=plain),
        dense(64, 32, bias=False, activation_function=plain),
        parts.Normalize(),
    )
    assert AutoModel.from_pretrained(tmp_path / "gemma").config.use_bidirectional_attention
    agree(library, tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_embedding_gemma_2(tmp_path, whole):
    """Embedding Gemma 2, alone and as the text of a model of several modalities: vectors of another size than its
    layers, windows to both sides, and no padding token in the whole model's configuration."""
    from transformers import AutoConfig

    text = {
        "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "max_position_embeddings": 256,
        "hidden_size_per_layer_input": 16, "embedding_dim": 24, "global_head_dim": 16, "num_global_key_value_heads": 1,
    }  # fmt: skip
    try:
        if whole:
            config = AutoConfig.for_model("embedding_gemma2", text_config=text, vision_config=None, audio_config=None)
        else:
            config = AutoConfig.for_model("embedding_gemma2_text", **text)
    except ValueError:
        pytest.skip("this transformers has no Embedding Gemma 2")
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(tmp_path / "gemma")
    byte_tokenizer().save_pretrained(tmp_path / "gemma")
    llm.save_model(tmp_path / "m", tmp_path / "gemma")
    found = embedded(tmp_path / "m")
    assert found.shape == (len(TEXTS), 24)
    with torch.inference_mode():
        for text, vector in zip(TEXTS, found, strict=True):
            ids = byte_tokenizer()(text, return_tensors="pt").input_ids
            own = model(input_ids=ids).last_hidden_state[0].mean(0)
            assert np.allclose(vector, own.numpy(), atol=2e-5)
