"""``export``: a Hugging Face directory from a logged model, loaded by the libraries that it is for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
import yaml
from flavor_models import TEMPLATE, add_lora, logits, tiny_llama
from mlflow.exceptions import MlflowException
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mlflow_llm.flavors import llm


def loaded(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def saved(llama_dir, adapter_dir, tmp_path):
    """Save the tiny Llama with two adapters, a template of its own and defaults."""
    source = tmp_path / "source"
    shutil.copytree(llama_dir, source)
    (source / "LICENSE").write_text("MIT License\n\nCopyright")
    add_lora(tiny_llama(), seed=7).save_pretrained(tmp_path / "pirate")
    llm.save_model(
        tmp_path / "saved",
        source,
        adapters={"formal": adapter_dir, "pirate": tmp_path / "pirate"},
        chat_template={"default": TEMPLATE + " ", "rag": TEMPLATE + "  "},
        defaults={"temperature": 0.5, "max_tokens": 7, "stop": "END", "seed": 3},
    )
    return tmp_path / "saved"


def test_base_and_adapters_give_equal_logits(saved, adapter_dir, tmp_path, caplog):
    """transformers loads the base, and peft each adapter beside it, with exactly the logits of the sources."""
    folder = llm.export(saved, tmp_path / "out")
    assert torch.equal(logits(loaded(folder)), logits(tiny_llama()))
    for name, seed in (("formal", 1), ("pirate", 7)):
        adapted = PeftModel.from_pretrained(loaded(folder), folder / "adapters" / name)
        assert torch.equal(logits(adapted), logits(add_lora(tiny_llama(), seed=seed)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == {"default": TEMPLATE + " ", "rag": TEMPLATE + "  "}
    config = GenerationConfig.from_pretrained(folder)
    assert (config.do_sample, config.temperature, config.max_new_tokens) == (True, 0.5, 7)
    assert config.stop_strings == ["END"]
    assert "not part of the export, for which the form has no place: seed=3" in caplog.text
    assert (folder / "LICENSE").read_text().startswith("MIT")


def test_an_adapter_is_merged(saved, tmp_path):
    """With ``merge`` the weights are the adapter's, and no adapter lies beside them."""
    folder = llm.export(saved, tmp_path / "out", merge="pirate")
    expected = logits(add_lora(tiny_llama(), seed=7))
    assert torch.allclose(logits(loaded(folder)), expected, atol=1e-4)
    assert not torch.allclose(logits(tiny_llama()), expected, atol=1e-2)
    assert not (folder / "adapters").exists()
    assert GenerationConfig.from_pretrained(folder).max_new_tokens == 7
    assert "`pirate`: `LORA`, rank 4" in (folder / "README.md").read_text()


def test_chosen_adapters_lie_beside(saved, tmp_path):
    """``adapters`` names those that are written; an empty list writes none."""
    assert [one.name for one in (llm.export(saved, tmp_path / "a", adapters=["formal"]) / "adapters").iterdir()] == [
        "formal"
    ]
    assert not (llm.export(saved, tmp_path / "b", adapters=[]) / "adapters").exists()


def test_the_export_can_be_logged_again(saved, tmp_path):
    """A model logged from its own export has the same weights, tokenizer and templates."""
    folder = llm.export(saved, tmp_path / "out")
    adapters = {name: folder / "adapters" / name for name in ("formal", "pirate")}
    llm.save_model(tmp_path / "again", folder, adapters=adapters, defaults={"seed": 3})
    before, after = llm.load_bundle(saved), llm.load_bundle(tmp_path / "again")
    assert after.model_hashes["model.safetensors"] == before.model_hashes["model.safetensors"]
    assert {n: Path(f).read_text() for n, f in after.chat_templates.items()} == {
        n: Path(f).read_text() for n, f in before.chat_templates.items()
    }
    assert sorted(after.adapters) == ["formal", "pirate"]


def test_an_adapter_alone_brings_its_base(store, llama_dir, adapter_dir, tmp_path):
    """A version that holds only an adapter is exported with its base; the card names version, hash, base and run."""
    with mlflow.start_run() as run:
        mlflow.log_artifacts(str(adapter_dir), "adapter")
    llm.log_model(llama_dir, name="m", registered_model_name="base")
    llm.log_model(
        name="a",
        base="models:/base/1",
        adapters={"formal": f"runs:/{run.info.run_id}/adapter"},
        registered_model_name="polite",
    )
    folder = llm.export("models:/polite/1", tmp_path / "out", merge="formal")
    assert torch.allclose(logits(loaded(folder)), logits(add_lora(tiny_llama())), atol=1e-4)
    card = (folder / "README.md").read_text()
    for part in ("`models:/polite/1`", "`models:/base/1`", f"by run `{run.info.run_id}`", "library_name: transformers"):
        assert part in card


def test_a_card_keeps_its_text(llama_dir, tmp_path):
    """The model's own card stays, with the lineage after it."""
    shutil.copytree(llama_dir, tmp_path / "carded")
    (tmp_path / "carded" / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    llm.save_model(tmp_path / "saved", tmp_path / "carded")
    text = (llm.export(tmp_path / "saved", tmp_path / "out") / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n---\n# Tiny\n\n## Exported from MLflow\n")


def test_a_greedy_default_is_greedy_in_transformers(llama_dir, tmp_path):
    """A temperature of 0 is ``do_sample: false``, which transformers writes without a temperature."""
    llm.save_model(tmp_path / "saved", llama_dir, defaults={"temperature": 0, "top_p": 0.5})
    written = json.loads((llm.export(tmp_path / "saved", tmp_path / "out") / "generation_config.json").read_text())
    assert written["do_sample"] is False
    assert not {"temperature", "top_p"} & written.keys()


def test_what_the_files_say_stays(llama_dir, tmp_path):
    """Without defaults of the caller's, generation_config.json is that of the model, byte for byte."""
    shutil.copytree(llama_dir, tmp_path / "source")
    own = '{"temperature":   0.25, "do_sample": true}'
    (tmp_path / "source" / "generation_config.json").write_text(own)
    llm.save_model(tmp_path / "saved", tmp_path / "source")
    assert (llm.export(tmp_path / "saved", tmp_path / "out") / "generation_config.json").read_text() == own


@pytest.mark.parametrize(
    "embedding", [None, {"pooling": "cls", "normalize": True, "prompts": {"query": "q: "}, "default_prompt": "query"}]
)
def test_an_encoder_is_a_directory_of_sentence_transformers(bert_dir, tmp_path, embedding):
    """sentence-transformers gives the vectors that the logged model gives, prompts included."""
    from sentence_transformers import SentenceTransformer

    llm.save_model(tmp_path / "saved", bert_dir, task="embeddings", embedding=embedding, max_model_len=64)
    folder = llm.export(tmp_path / "saved", tmp_path / "out")
    texts = ["a fox", "an entirely different line"]
    with llm.closing(llm.load_model(tmp_path / "saved", in_process=True)) as model:
        ours = np.asarray(model.embed(texts))
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts)
    assert np.allclose(ours, theirs, atol=1e-5)


def test_what_cannot_be_said_is_named(bert_dir, tmp_path, caplog):
    """Vectors that are normalised after they are cut have no setting in sentence-transformers; a warning says so."""
    llm.save_model(tmp_path / "saved", bert_dir, task="embeddings", embedding={"truncate_dim": 8, "normalize": True})
    folder = llm.export(tmp_path / "saved", tmp_path / "out")
    assert "no place: normalize=True" in caplog.text
    assert "Not part of the export: `normalize=True`" in (folder / "README.md").read_text()
    head = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    assert head["library_name"] == "sentence-transformers"


REFUSED = {
    "no such adapter": ({"merge": "none"}, "merge: 'none' is not an adapter of the model; it has formal, pirate"),
    "not beside": ({"adapters": ["none"]}, "adapters: 'none' is not an adapter of the model; it has formal, pirate"),
    "both": ({"merge": "pirate", "adapters": ["formal"]}, r"adapters: \['formal'\] is not allowed with merge="),
    "a text": ({"adapters": "formal"}, "adapters: 'formal' is not allowed; expected a list of names"),
}


@pytest.mark.parametrize(("asked", "message"), REFUSED.values(), ids=REFUSED)
def test_adapters_that_are_none_are_refused(saved, tmp_path, asked, message):
    """An adapter that the model does not have, or that does not fit what is written, is refused by name."""
    with pytest.raises(MlflowException, match=message):
        llm.export(saved, tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


def test_a_learned_prompt_is_not_merged(llama_dir, tmp_path):
    """A learned prompt changes no weights; the refusal leaves nothing behind."""
    prompt = get_peft_model(tiny_llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    prompt.save_pretrained(tmp_path / "prompt")
    llm.save_model(tmp_path / "saved", llama_dir, adapters={"p": tmp_path / "prompt"})
    with pytest.raises(MlflowException, match="merge: 'p' is not allowed: 'PROMPT_TUNING' is a learned prompt"):
        llm.export(tmp_path / "saved", tmp_path / "out", merge="p")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_our_own_quantised_weights_are_refused(llama_dir, adapter_dir, tmp_path, quantize):
    """Weights in a form that only this package reads are not passed off as a checkpoint of Hugging Face's."""
    llm.save_model(tmp_path / "saved", llama_dir, quantize=quantize, calibration=["a text " * 40])
    with pytest.raises(MlflowException, match="model_uri: the weights were quantised when the model was logged"):
        llm.export(tmp_path / "saved", tmp_path / "out")


def test_a_directory_with_files_is_refused(saved, tmp_path):
    """Nothing is written over files of the caller's."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("mine")
    with pytest.raises(MlflowException, match="path: out already exists and is not empty"):
        llm.export(saved, tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "mine"
