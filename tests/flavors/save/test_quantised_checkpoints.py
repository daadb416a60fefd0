"""Checkpoints that are quantised already, which are refused by the name of their format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.exceptions import MlflowException
from safetensors.torch import load_file, save_file

from mlflow_llm.flavors import llm
from mlflow_llm.serving.interface.errors import PackagingError

# quantization_config as checkpoints on the hub have it
FORMS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "FP8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "MXFP4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "'newer-than-this'": {"quant_method": "newer-than-this"},
}


def saved(tmp_path: Path, llama_dir: Path, **config: Any) -> Path:
    source = tmp_path / "source"
    shutil.copytree(llama_dir, source)
    own = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(own | config))
    return source


def refused(tmp_path: Path, source: Path) -> str:
    with pytest.raises(PackagingError) as error:
        llm.save_model(tmp_path / "m", source)
    assert not (tmp_path / "m" / "MLmodel").exists()
    return str(error.value)


# and such that the engine reads
READ: dict[str, dict[str, Any]] = {
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_refused_by_name(name: str, tmp_path: Path, llama_dir: Path) -> None:
    """The refusal names the format, where it is declared, and what to do."""
    text = refused(tmp_path, saved(tmp_path, llama_dir, quantization_config=FORMS[name]))
    assert f"are quantised already: {name}" in text
    assert "(quantization_config)" in text
    assert "quantization='int8'" in text


def test_formats_declared_elsewhere_are_refused(tmp_path: Path, llama_dir: Path) -> None:
    """A format declared in the text config, an older field, without a method or in ModelOpt's file is refused."""
    for number, (config, expected) in enumerate(
        (
            ({"text_config": {"quantization_config": FORMS["FP8"]}}, "FP8 (text_config.quantization_config)"),
            ({"compression_config": FORMS["compressed-tensors"]}, "(compression_config)"),
            ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes (quantization_config)"),
            ({"quantization_config": [1]}, "a form that is not named"),
        )
    ):
        place = tmp_path / str(number)
        assert expected in refused(place, saved(place, llama_dir, **config))
    source = saved(tmp_path / "modelopt", llama_dir)
    (source / "hf_quant_config.json").write_text("{}")
    assert "ModelOpt" in refused(tmp_path, source)


def test_a_null_quantization_config_is_ignored(tmp_path: Path, llama_dir: Path) -> None:
    """A quantization_config of null is ignored and the model is saved."""
    llm.save_model(tmp_path / "m", saved(tmp_path, llama_dir, quantization_config=None))
    assert (tmp_path / "m" / "MLmodel").is_file()


@pytest.mark.parametrize("name", ["bitsandbytes", "MXFP4", "FP8"])
def test_a_model_for_vllm_may_be_quantised(name: str, tmp_path: Path, llama_dir: Path) -> None:
    """The refusal says that vLLM runs such weights; a model logged for it is stored with its files as they are, and our
    own engine refuses to load it."""
    source = saved(tmp_path, llama_dir, quantization_config=FORMS[name])
    assert "log it with engine='vllm'" in refused(tmp_path, source)
    llm.save_model(tmp_path / "kept", source, engine="vllm")
    weights = [path.name for path in source.glob("*.safetensors")]
    assert weights
    root = next((tmp_path / "kept").rglob("model/config.json")).parent
    assert [(root / name).read_bytes() for name in weights] == [(source / name).read_bytes() for name in weights]
    refuses = pytest.raises(MlflowException, match="engine vllm runs others")
    with llm.load_model(str(tmp_path / "kept"), engine="native", in_process=True) as model, refuses:
        model.complete("x", max_tokens=1)


def in_awq(source: Path) -> None:
    """Replace the linears of the Llama in ``source`` by random ones in AWQ's form of 4 bits."""
    file, make = source / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors.pop(name).shape
        values = torch.randint(0, 16, (columns, rows), generator=make)
        scale = (torch.rand(columns // 16, rows, generator=make) * 0.02 + 0.01).half()
        eights = values.unflatten(1, (-1, 8))
        words = sum(eights[..., one] << (4 * i) for i, one in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
        path = name.removesuffix(".weight")
        tensors[f"{path}.qweight"] = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
        tensors[f"{path}.qzeros"] = torch.full((columns // 16, rows // 8), -0x77777778, dtype=torch.int32)  # 8 each
        tensors[f"{path}.scales"] = scale
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_checkpoint_that_the_engine_reads_is_logged_as_it_is(tmp_path: Path, llama_dir: Path) -> None:
    """A checkpoint in AWQ is stored with its files as they are, says that it is in int4, and answers; another
    quantization for it is refused by name."""
    source = saved(tmp_path, llama_dir, quantization_config=READ["AWQ"])
    in_awq(source)
    llm.save_model(tmp_path / "m", source)
    root = next((tmp_path / "m").rglob("model/config.json")).parent
    assert (root / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert "quantization: int4" in (tmp_path / "m/MLmodel").read_text()
    with llm.load_model(str(tmp_path / "m"), in_process=True) as model:
        assert model.complete("x", max_tokens=2)
    for given, match in (({"quantize": "int8"}, "quantize: 'int8'"), ({"quantization": "none"}, "expected 'int4'")):
        with pytest.raises((PackagingError, MlflowException), match=match):
            llm.save_model(tmp_path / "n", source, **given)
        assert not (tmp_path / "n").exists()


def test_variants_that_the_engine_does_not_read_are_refused(tmp_path: Path, llama_dir: Path) -> None:
    """GPTQ of 8 bits is refused by the entry that says so."""
    text = refused(tmp_path, saved(tmp_path, llama_dir, quantization_config=READ["GPTQ"] | {"bits": 8}))
    assert "quantization_config.bits: 8 is not allowed; expected 4" in text
