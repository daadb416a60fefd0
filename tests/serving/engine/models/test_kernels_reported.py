"""The kernels that an engine reports, and its reasons for not using the native ones."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import transformers as tf
from tiny_models import COMMON, make_model, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import EngineInfo
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.system import child

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64}
SIZES = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
here = pytest.mark.skipif(library.library() is None, reason="no compiler, or a CPU without AVX2")


NAMED = library.instruction_set()


def info_of(bundle: Bundle, **settings: Any) -> EngineInfo:
    core = EngineCore(bundle, EngineSettings(kv_cache_memory=1 << 24, **settings))
    core.close()
    return core.info


@here
@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (tf.LlamaConfig(**WIDE), {"kernels": "torch"}, "the setting kernels is 'torch'"),
        (tf.LlamaConfig(**WIDE), {"dtype": "float16"}, "dtype is float16"),
        (tf.CohereConfig(**WIDE), {}, "CohereForCausalLM"),
        (tf.LlamaConfig(**COMMON), {}, "heads of"),
        (tf.LlamaConfig(**COMMON), {"dtype": "bfloat16"}, "heads of"),
    ],
)
def test_why_a_decoder_is_not_run_natively(config: Any, settings: Any, reason: str, tmp_path: Path) -> None:
    """The reported reason names the setting, the precision, the architecture or the heads."""
    info = info_of(save_bundle(make_model(config), tmp_path), **settings)
    assert (info.kernels, reason in info.kernels_reason) == ("torch", True), info.kernels_reason
    assert info.kernels_summary == f"torch ({info.kernels_reason})"


@here
def test_an_embedder_reports_its_kernels(tmp_path: Path) -> None:
    """An embedder honours the setting, and reports no reason when it runs natively."""
    model = tf.BertModel(tf.BertConfig(**SIZES, num_attention_heads=2))
    bundle = msgspec.structs.replace(save_bundle(model, tmp_path), tasks=("embeddings",))
    assert info_of(bundle, kernels="torch").kernels_reason == "the setting kernels is 'torch'"
    info = info_of(bundle)
    assert (info.kernels, info.kernels_reason, info.kernels_summary) == ("native", "", f"native ({NAMED})")


def test_a_missing_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose library is not compiled, or for another CPU, runs and reports it."""
    monkeypatch.setattr(library, "loaded", lambda: "the CPU lacks AVX2")
    info = info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path))
    assert (info.kernels, info.kernels_reason) == ("torch", "the CPU lacks AVX2")


@here
def test_an_engine_names_its_instruction_set(instructions: str, tmp_path: Path) -> None:
    """The reported instruction set is the one whose kernels run."""
    info = info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path))
    assert (info.kernels, info.instruction_set) == ("native", instructions)
    compiled_for = library.required().mlflow_llm_instructions().decode()
    assert compiled_for == {"avx-vnni": "avx2", "avx512+amx": "avx512"}.get(instructions, instructions)


@pytest.fixture
def loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    caches = (library.load, library.chosen)
    for known in caches:
        known.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for known in caches:
        known.cache_clear()
    library.use_instruction_set("")


@here
def test_a_library_of_another_version_is_not_called(loaded_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library of another interface version is reported and not called; the engine runs on torch."""
    loaded_anew.setattr(library, "INTERFACE_VERSION", 1000)
    info = info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path))
    assert info.kernels == "torch"
    assert "compiled with another version of the package" in info.kernels_reason


@here
def test_a_library_of_other_sources_is_not_called(loaded_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a checkout, a library older than its sources is not called, and the reason names the command to build it."""
    loaded_anew.setattr(library, "sources_digest", lambda: "0" * 64)
    info = info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path))
    assert info.kernels == "torch"
    assert "other sources" in info.kernels_reason
    assert "python setup.py build_ext --inplace" in info.kernels_reason
    loaded_anew.setattr(library, "sources_digest", lambda: None)  # a wheel, which has no sources
    assert info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path / "wheel")).kernels == "torch"
    library.load.cache_clear()
    library.chosen.cache_clear()
    assert library.library() is not None


@here
def test_every_instruction_set_is_compiled() -> None:
    """Every instruction set of a compiled library is there, so no CPU falls back to torch unnoticed."""
    assert [name for name in library.INSTRUCTION_SETS if "compiled" in (library.why_not(name) or "")] == []


def test_every_structure_of_the_interface_is_compared() -> None:
    """The size of every structure is compared between Python and the library."""
    declared = {one for one in vars(library).values() if isinstance(one, type) and issubclass(one, ctypes.Structure)}
    assert declared == set(library.STRUCTURES)


@here
def test_tiles_run_only_with_their_own_instruction_set(instructions: str) -> None:
    """Tiles run only with the instruction set that is named for them, so that measurements without them are valid."""
    assert library.instruction_set() == instructions
    assert library.tiles() == (library.AMX if instructions.endswith("+amx") else library.NO_TILES)


@here
def test_an_invalid_instruction_set_is_refused(loaded_anew: pytest.MonkeyPatch) -> None:
    """An unknown instruction set, or one that the CPU lacks, is refused with the variable's name."""
    library.use_instruction_set("sse2")
    with pytest.raises(library.NotNative, match=r"MLFLOW_LLM_INSTRUCTION_SET is 'sse2', not one of"):
        library.required()
    name = list(library.INSTRUCTION_SETS)[-1]
    loaded_anew.setattr(library, "load", library.lacks)
    library.use_instruction_set(name)
    with pytest.raises(library.NotNative, match=rf"INSTRUCTION_SET is '{name}': the CPU lacks"):
        library.required()
    library.use_instruction_set("")
    with pytest.raises(library.NotNative, match=rf"^{library.lacks(name)}$"):
        library.required()


def test_sve_is_chosen_by_name_alone(loaded_anew: pytest.MonkeyPatch) -> None:
    """SVE runs only when asked for by name; if it cannot run, that request alone gets the reason."""
    kernels = SimpleNamespace(mlflow_llm_use_byte_products=lambda use: use, mlflow_llm_use_tiles=lambda use: use)
    loaded_anew.setattr(library, "INSTRUCTION_SETS", library.ARM)
    loaded_anew.setattr(library, "load", lambda name: kernels)
    assert [library.chosen(name)[1] for name in ("", "sve", "sve-i8mm")] == ["neon-i8mm", "sve", "sve-i8mm"]
    library.chosen.cache_clear()
    loaded_anew.setattr(library, "load", library.lacks)
    assert library.chosen("") == (library.lacks("neon"), "")
    assert library.chosen("sve") == (f"MLFLOW_LLM_INSTRUCTION_SET is 'sve': {library.lacks('sve')}", "")


def test_an_instruction_set_the_compiler_lacks(loaded_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An instruction set that the compiler could not build is reported as missing, beside others that are there."""
    loaded_anew.setattr(library, "INSTRUCTION_SETS", library.ARM)
    loaded_anew.setattr(library, "file_of", lambda instructions: tmp_path / instructions.file)
    assert "built without a compiler, or by one that does not know these" in str(library.why_not("sve"))


def test_the_survey_of_a_child_process() -> None:
    """The survey that ``doctor`` runs reports the package that engines import and whether its kernels run."""
    command, environment = child.python_command("serving.engine.native.survey"), child.environment()
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=True)
    found = json.loads(done.stdout)
    assert found["package"] == child.package_place()
    assert found["kernels"] == ("torch" if library.library() is None else "native")
