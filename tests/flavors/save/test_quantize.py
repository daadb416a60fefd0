"""Weights quantised once, when a model is logged."""

import json
from pathlib import Path

import mlflow
import pytest
from flavor_models import tiny_llama
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from mlflow_llm.flavors import llm


def test_answers_as_quantised_at_load(store, llama_dir, adapter_dir):
    """Base and adapter of a model logged with quantize, with the adapter together or alone over it, answer like the
    whole weights with quantization="int8"."""
    llm.log_model(llama_dir, name="q", registered_model_name="q", adapters={"formal": adapter_dir}, quantize="int8")
    llm.log_model(llama_dir, name="b", registered_model_name="b", quantize="int8")
    llm.log_model(name="a", registered_model_name="a", adapters={"formal": adapter_dir}, base="models:/b/1")
    llm.log_model(llama_dir, name="w", registered_model_name="w", adapters={"formal": adapter_dir}, quantization="int8")
    body = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    texts = {}
    for name in ("q", "a", "w"):
        model = mlflow.pyfunc.load_model(f"models:/{name}/1", model_config={"in_process": True})
        texts[name] = [model.predict(body | {"adapter": one})["choices"][0]["text"] for one in (None, "formal")]
        llm.close(model)
    assert texts["q"] == texts["a"] == texts["w"]


def test_a_quantised_model_is_described(tmp_path, llama_dir):
    """The MLmodel file has the quantization, the size and the setting; the manifest covers the stored files and is
    refused by earlier releases. A model stored unquantised has none of this."""
    llm.save_model(tmp_path / "m", llama_dir, quantize="int8", link_files=True)
    said = Model.load(str(tmp_path / "m"))
    assert said.flavors["llm"]["quantization"] == "int8"
    assert said.flavors["llm"]["format_version"] == 3
    assert said.flavors["python_function"]["config"]["quantization"] == "int8"
    assert said.model_size_bytes >= (tmp_path / "m/model/model.safetensors").stat().st_size
    manifest = json.loads((tmp_path / "m/manifest.json").read_text())
    assert (manifest["format_version"], manifest["quantization"]) == (3, "int8")
    assert llm.load_bundle(tmp_path / "m", verify="full").content_hash == manifest["content_hash"]
    llm.save_model(tmp_path / "again", llama_dir, quantize="int8")
    assert llm.load_bundle(tmp_path / "again").content_hash == manifest["content_hash"]
    llm.save_model(tmp_path / "plain", llama_dir)
    plain = Model.load(str(tmp_path / "plain"))
    assert plain.flavors["llm"]["quantization"] is None
    assert plain.flavors["python_function"]["config"]["quantization"] == "none"
    before = Path(llama_dir, "model.safetensors").stat().st_size
    assert (tmp_path / "m/model/model.safetensors").stat().st_size < before


def test_a_model_object(tmp_path, tokenizer):
    """A model object is quantised like a directory, and left unchanged."""
    model = tiny_llama()
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    llm.save_model(tmp_path / "m", model, tokenizer=tokenizer, quantize="int8")
    assert model.model.layers[0].mlp.up_proj.weight.equal(before)
    assert json.loads((tmp_path / "m/manifest.json").read_text())["quantization"] == "int8"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"quantize": "int3"}, "quantize: 'int3' is not allowed; expected 'int8' or 'int4'"),
        ({"calibration": ["x"]}, "calibration: only quantize='int8' and quantize='int4' use it"),
        ({"quantize": "int4", "calibration": "x"}, "calibration: 'x' is not allowed; expected a list of texts"),
        ({"quantize": "int4", "calibration": []}, "calibration: .* is not allowed"),
        ({"quantize": "int4", "calibration": ["a", "\ud800"]}, r"calibration: \['a', '\\ud800'\] is not allowed"),
        ({"quantize": 8}, "quantize: 8 is not allowed"),
        ({"quantize": "int8", "quantization": "none"}, "quantization: 'none' is not allowed; expected 'int8'"),
        ({"quantize": "int8", "model_config": {"quantization": "none"}}, "quantization: 'none' is not allowed"),
        ({"quantize": "int8", "trust_remote_code": True}, "quantize: 'int8' is not allowed with trust_remote_code"),
        ({"quantize": "int8", "base": "models:/x/1", "model": None}, "quantize: 'int8' is not allowed with base="),
    ],
)
def test_refused_by_name(tmp_path, llama_dir, given, match):
    """Models and values that cannot be quantised are refused by field and value, and nothing is left behind."""
    with pytest.raises(MlflowException, match=match):
        llm.save_model(tmp_path / "m", **{"model": llama_dir, **given})
    assert not (tmp_path / "m").exists()


def test_another_quantization_is_refused_at_load(tmp_path, llama_dir):
    """A model loaded with another quantization than its own is refused by name when its engine starts."""
    llm.save_model(tmp_path / "m", llama_dir, quantize="int8")
    refused = pytest.raises(MlflowException, match="quantization: 'none' is not allowed; expected 'int8'")
    with llm.load_model(str(tmp_path / "m"), in_process=True, quantization="none") as model, refused:
        model.complete("x", max_tokens=1)


def test_not_quantised_twice(tmp_path, llama_dir):
    """A quantised model cannot be logged again: the original must be."""
    llm.save_model(tmp_path / "m", llama_dir, quantize="int8")
    with pytest.raises(MlflowException, match=r"quantised already: log_model\(quantize=…\)"):
        llm.save_model(tmp_path / "n", str(tmp_path / "m/model"), tokenizer=str(llama_dir), quantize="int8")
