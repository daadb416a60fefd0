"""The forms a model may come in, and what is stored of each."""

import json
import shutil

import huggingface_hub
import pytest
import torch
from flavor_models import byte_tokenizer, logits, tiny_llama
from mlflow.exceptions import MlflowException
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mlflow_llm.flavors import llm
from mlflow_llm.serving.interface.bundle import EmbeddingSpec


def reload(bundle):
    return AutoModelForCausalLM.from_pretrained(bundle.model_dir).eval()


def test_directory_is_taken_as_it_is(tmp_path, llama_dir):
    """The weights and config of a local directory are stored byte for byte; the tokenizer is stored apart."""
    llm.save_model(tmp_path / "m", llama_dir)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "m/model" / name).read_bytes() == (llama_dir / name).read_bytes()
    assert not (tmp_path / "m/model/tokenizer.json").exists()
    assert (tmp_path / "m/tokenizer/tokenizer.json").read_bytes() == (llama_dir / "tokenizer.json").read_bytes()


def test_directory_is_never_loaded(tmp_path, llama_dir, monkeypatch):
    """Saving a directory reads no weights into memory: neither torch's nor safetensors' loaders are called, and
    transformers' only for the meta device."""
    from_pretrained = PreTrainedModel.from_pretrained.__func__

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    def without_memory(cls, *args, **kwargs):
        model, found = from_pretrained(cls, *args, **kwargs)
        assert all(parameter.is_meta for parameter in model.parameters())
        return model, found

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(without_memory))
    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    monkeypatch.setattr("torch.load", refuse)
    llm.save_model(tmp_path / "m", llama_dir)
    assert llm.load_bundle(tmp_path / "m").tasks == ("chat", "completions")


def test_link_files(tmp_path, llama_dir):
    """Files are copied unless links are asked for; a linked file is the same file."""
    source = tmp_path / "source"
    shutil.copytree(llama_dir, source)
    llm.save_model(tmp_path / "copied", source)
    llm.save_model(tmp_path / "linked", source, link_files=True)
    assert not (tmp_path / "copied/model/model.safetensors").samefile(source / "model.safetensors")
    assert (tmp_path / "linked/model/model.safetensors").samefile(source / "model.safetensors")


def test_model_object(tmp_path, tokenizer):
    """A PreTrainedModel reloads with equal logits, and its config is the caller's."""
    model = tiny_llama(seed=3)
    llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)
    bundle = llm.load_bundle(tmp_path / "m")
    assert torch.equal(logits(reload(bundle)), logits(model))
    assert AutoTokenizer.from_pretrained(bundle.tokenizer_dir)("hello").input_ids == tokenizer("hello").input_ids


def test_model_object_needs_a_tokenizer(tmp_path):
    """A model object has no tokenizer, and the error says what to pass."""
    with pytest.raises(MlflowException, match="pass tokenizer="):
        llm.save_model(tmp_path / "m", tiny_llama())
    assert not (tmp_path / "m").exists()


def test_tied_weights_of_an_object(tmp_path, tokenizer):
    """A model whose head is its embedding is stored once and reloads equal."""
    model = tiny_llama(tie_word_embeddings=True)
    llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)
    assert "lm_head.weight" not in load_file(tmp_path / "m/model/model.safetensors")
    assert torch.equal(logits(reload(llm.load_bundle(tmp_path / "m"))), logits(model))


@pytest.mark.parametrize("tied", [False, True])
def test_pickled_checkpoint_is_converted(tmp_path, tokenizer, tied):
    """pytorch_model.bin becomes safetensors with equal tensors, also where two names share one memory."""
    model = tiny_llama(tie_word_embeddings=tied)
    source = tmp_path / "source"
    tokenizer.save_pretrained(source)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(source)
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    llm.save_model(tmp_path / "m", source)
    assert sorted(p.suffix for p in (tmp_path / "m/model").iterdir()) == [".json", ".safetensors"]
    assert torch.equal(logits(reload(llm.load_bundle(tmp_path / "m"))), logits(model))


def test_sharded_pickled_checkpoint(tmp_path, llama_dir):
    """The shards of a pickled checkpoint become shards of safetensors under an index."""
    source = tmp_path / "source"
    shutil.copytree(llama_dir, source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for shard, part in shards.items():
        torch.save({name: tensors[name] for name in part}, source / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    llm.save_model(tmp_path / "m", source)
    assert len(list((tmp_path / "m/model").glob("model-0000?-of-00002.safetensors"))) == 2
    assert torch.equal(logits(reload(llm.load_bundle(tmp_path / "m"))), logits(tiny_llama()))
    (source / "pytorch_model-2.bin").unlink()
    with pytest.raises(MlflowException, match=r"pytorch_model-2\.bin is listed .* but is not there"):
        llm.save_model(tmp_path / "n", source)


def test_stale_checkpoints_beside_weights(tmp_path, caplog):
    """The checkpoint that transformers would load is stored; the others in the directory are named."""
    source = tmp_path / "source"
    tiny_llama(seed=1).save_pretrained(source, max_shard_size="20KB")
    (source / "pytorch_model.bin").write_bytes(b"stale")
    newer = tiny_llama(seed=2)
    newer.save_pretrained(source)
    assert (source / "model.safetensors.index.json").is_file()
    llm.save_model(tmp_path / "m", source, tokenizer=byte_tokenizer())
    assert torch.equal(logits(reload(llm.load_bundle(tmp_path / "m"))), logits(newer))
    assert "model.safetensors.index.json, pytorch_model.bin" in caplog.text
    # the other way round: whole pickled weights are preferred to an index of others, as transformers does
    pickled = tmp_path / "pickled"
    shutil.copytree(source, pickled)
    for file in pickled.glob("model*.safetensors*"):
        file.unlink()
    torch.save(newer.state_dict(), pickled / "pytorch_model.bin")
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "gone.bin"}}))
    llm.save_model(tmp_path / "n", pickled, tokenizer=byte_tokenizer())
    assert torch.equal(logits(reload(llm.load_bundle(tmp_path / "n"))), logits(newer))


def test_config_that_names_other_weights_is_refused(tmp_path, llama_dir):
    """A config whose ``transformers_weights`` names a file that is not stored is refused by the field."""
    source = tmp_path / "source"
    shutil.copytree(llama_dir, source)
    config = json.loads((source / "config.json").read_text()) | {"transformers_weights": "other.safetensors"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(MlflowException, match=r"transformers_weights = 'other\.safetensors' .* model\.safetensors"):
        llm.save_model(tmp_path / "m", source)


def test_pickle_with_code_is_not_run(tmp_path, llama_dir):
    """A checkpoint that holds more than tensors is refused without running what it holds."""
    source = tmp_path / "source"
    shutil.copytree(llama_dir, source)
    (source / "model.safetensors").unlink()
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self):
            return trap.touch, ()

    torch.save({"a": Trap()}, source / "pytorch_model.bin")
    with pytest.raises(MlflowException, match="cannot be converted"):
        llm.save_model(tmp_path / "m", source)
    assert not trap.exists()


def test_safetensors_are_preferred(tmp_path, llama_dir):
    """From a directory with both, safetensors are stored; pickles, other formats and hidden files are not."""
    source = tmp_path / "source"
    shutil.copytree(llama_dir, source)
    for name in ("pytorch_model.bin", "model.onnx", "training_args.bin", ".secret", "trainer_state.json"):
        (source / name).write_bytes(b"x")
    (source / "README.md").write_text("# card")
    llm.save_model(tmp_path / "m", source)
    kept = {p.name for p in (tmp_path / "m/model").iterdir()}
    assert kept == {"config.json", "generation_config.json", "model.safetensors", "README.md"}


def test_encoder_directory_answers_embeddings(tmp_path, bert_dir):
    """A plain encoder becomes an embedding model with mean pooling."""
    llm.save_model(tmp_path / "m", bert_dir)
    bundle = llm.load_bundle(tmp_path / "m")
    assert bundle.tasks == ("embeddings",)
    assert bundle.embedding.pooling == "mean"
    AutoModel.from_pretrained(bundle.model_dir)


def test_decoder_for_embeddings_by_task(tmp_path, llama_dir):
    """A decoder embeds if the task says so, with last-token pooling or the caller's."""
    llm.save_model(tmp_path / "m", llama_dir, task="embeddings")
    assert llm.load_bundle(tmp_path / "m").embedding.pooling == "lasttoken"
    llm.save_model(tmp_path / "n", llama_dir, task="llm/v1/embeddings", embedding={"pooling": "mean"})
    assert llm.load_bundle(tmp_path / "n").embedding.pooling == "mean"
    with pytest.raises(MlflowException, match="embedding:"):
        llm.save_model(tmp_path / "o", llama_dir, task="embeddings", embedding={"pooling": 3})


@pytest.mark.parametrize("given", [None, EmbeddingSpec(pooling="mean")])
def test_a_module_that_cannot_run_is_refused(tmp_path, bert_dir, given):
    """A sentence-transformers module that would be left out is refused by name, also where the pooling is given."""
    source = tmp_path / "source"
    shutil.copytree(bert_dir, source)
    kinds = ["Transformer", "Pooling", "CNN"]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in kinds]
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(MlflowException, match="modules Transformer, Pooling, CNN are not supported"):
        llm.save_model(tmp_path / "m", source, embedding=given)
    assert not (tmp_path / "m").exists()


def test_tasks(tmp_path, llama_dir):
    """The tasks are chat and completions with a template, completions without, or the ones given."""
    plain = tmp_path / "plain"
    shutil.copytree(llama_dir, plain)
    (plain / "chat_template.jinja").unlink()
    llm.save_model(tmp_path / "a", plain)
    assert llm.load_bundle(tmp_path / "a").tasks == ("completions",)
    llm.save_model(tmp_path / "b", llama_dir, task=["completions", "completions"])
    assert llm.load_bundle(tmp_path / "b").tasks == ("completions",)


def test_embeddings_beside_generation(tmp_path, llama_dir):
    """A model with both embeddings and generation as tasks is refused when saved."""
    with pytest.raises(MlflowException, match="task: chat, embeddings is not allowed; expected embeddings alone"):
        llm.save_model(tmp_path / "m", llama_dir, task=["llm/v1/chat", "embeddings"])
    assert not (tmp_path / "m").exists()


def test_tokenizer_from_elsewhere(tmp_path, llama_dir, tokenizer):
    """A tokenizer given as an object or a directory replaces the one beside the model."""
    other = byte_tokenizer(chat_template=None)
    other.add_tokens(["hello"])
    llm.save_model(tmp_path / "a", llama_dir, tokenizer=other)
    other.save_pretrained(tmp_path / "tokens")
    llm.save_model(tmp_path / "b", llama_dir, tokenizer=str(tmp_path / "tokens"))
    for name in ("a", "b"):
        bundle = llm.load_bundle(tmp_path / name)
        assert AutoTokenizer.from_pretrained(bundle.tokenizer_dir)("hello").input_ids == [261]
        assert bundle.tasks == ("completions",)


def test_hub_id(tmp_path, llama_dir, monkeypatch):
    """A hub id is fetched at its revision, without pickles where there are safetensors, following the cache's links."""
    snapshot = tmp_path / "cache/snapshots/abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(llama_dir, tmp_path / "cache/blobs")
    for file in llama_dir.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    calls = []

    def fetch(repo_id, revision=None, ignore_patterns=None, local_files_only=False):
        calls.append((repo_id, revision, ignore_patterns is not None))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    llm.save_model(tmp_path / "m", "someone/tiny-llama", revision="v2")
    assert calls == [("someone/tiny-llama", "v2", True)]
    stored = tmp_path / "m/model/model.safetensors"
    assert not stored.is_symlink()
    assert stored.read_bytes() == (llama_dir / "model.safetensors").read_bytes()


def test_hub_id_that_cannot_be_had(tmp_path, monkeypatch):
    """An unreachable hub gives a short error that names the id."""

    def fail(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(MlflowException, match="'someone/tiny' is not a local path and could not be fetched") as caught:
        llm.save_model(tmp_path / "m", "someone/tiny")
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (42, "a int is not allowed"),
        ("/no/such/directory", "neither a directory, nor a file, nor a hub id"),
        (torch.nn.Linear(2, 2), "a Linear is not allowed"),
        (None, "pass either model= or"),
    ],
)
def test_forms_that_are_refused(tmp_path, tokenizer, model, reason):
    """Anything that is not a model is refused by name, and nothing is left behind."""
    with pytest.raises(MlflowException, match=reason):
        llm.save_model(tmp_path / "m", model, tokenizer=tokenizer)
    assert not (tmp_path / "m").exists()


def test_incomplete_directories(tmp_path, llama_dir, adapter_dir):
    """A directory without weights, without a config, or with an adapter instead of a model says so."""
    bare = tmp_path / "bare"
    shutil.copytree(llama_dir, bare)
    (bare / "model.safetensors").unlink()
    with pytest.raises(MlflowException, match="holds no weights"):
        llm.save_model(tmp_path / "m", bare)
    (bare / "config.json").unlink()
    with pytest.raises(MlflowException, match=r"holds no config\.json"):
        llm.save_model(tmp_path / "m", bare)
    with pytest.raises(MlflowException, match="holds an adapter, not a model"):
        llm.save_model(tmp_path / "m", adapter_dir)


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_that_lack_a_tensor(tmp_path, llama_dir, lost):
    """A missing tensor is named when the model is saved, because it would be initialised at random."""
    source = tmp_path / "source"
    shutil.copytree(llama_dir, source)
    kept = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if name != lost}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MlflowException, match=rf"incomplete: they lack 1 of the model's tensors: {lost}$"):
        llm.save_model(tmp_path / "m", source)
    assert not (tmp_path / "m").exists()


def test_weights_that_are_not_needed(tmp_path, llama_dir, bert_dir):
    """An embedding model needs neither the head of a decoder nor the pooler of an encoder."""
    for name, directory, lost in (("a", llama_dir, "lm_head."), ("b", bert_dir, "pooler.")):
        source = tmp_path / f"source-{name}"
        shutil.copytree(directory, source)
        kept = {k: v for k, v in load_file(source / "model.safetensors").items() if not k.startswith(lost)}
        save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
        llm.save_model(tmp_path / name, source, task="embeddings")
        assert llm.load_bundle(tmp_path / name).tasks == ("embeddings",)


def test_path_must_be_free(tmp_path, llama_dir):
    """An existing model is not overwritten, and a refusal leaves an empty folder as it was."""
    llm.save_model(tmp_path / "m", llama_dir)
    with pytest.raises(MlflowException, match="already exists and is not empty"):
        llm.save_model(tmp_path / "m", llama_dir)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MlflowException, match="neither a directory"):
        llm.save_model(tmp_path / "empty", "/no/such")
    assert list((tmp_path / "empty").iterdir()) == []
