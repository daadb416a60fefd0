"""An engine says which kernels it runs on, and why not ours."""

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
here = pytest.mark.skipif(library.library() is None, reason="no compiler, or a processor without AVX2")


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
    """The setting, the precision, the architecture or the heads are named."""
    info = info_of(save_bundle(make_model(config), tmp_path), **settings)
    assert (info.kernels, reason in info.kernels_reason) == ("torch", True), info.kernels_reason
    assert info.kernels_summary == f"torch ({info.kernels_reason})"


@here
def test_an_embedder_says_so_too(tmp_path: Path) -> None:
    """Its setting is honoured, and a model that runs natively gives no reason."""
    model = tf.BertModel(tf.BertConfig(**SIZES, num_attention_heads=2))
    bundle = msgspec.structs.replace(save_bundle(model, tmp_path), tasks=("embeddings",))
    assert info_of(bundle, kernels="torch").kernels_reason == "the setting kernels is 'torch'"
    info = info_of(bundle)
    assert (info.kernels, info.kernels_reason, info.kernels_summary) == ("native", "", f"native ({NAMED})")


def test_a_missing_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, or for another processor: the engine runs, and says so."""
    monkeypatch.setattr(library, "_loaded", lambda: "the CPU lacks AVX2")
    info = info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path))
    assert (info.kernels, info.kernels_reason) == ("torch", "the CPU lacks AVX2")


@here
def test_an_engine_names_its_instruction_set(instructions: str, tmp_path: Path) -> None:
    """The one whose kernels run, which are compiled for it."""
    info = info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path))
    assert (info.kernels, info.instruction_set) == ("native", instructions)
    compiled_for = library.required().mlflow_llm_instructions().decode()
    assert compiled_for == {"avx-vnni": "avx2", "avx512+amx": "avx512"}.get(instructions, instructions)


@pytest.fixture
def loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    caches = (library._load, library._chosen)
    for known in caches:
        known.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for known in caches:
        known.cache_clear()
    library.use_instruction_set("")


@here
def test_a_library_of_another_version_is_not_called(loaded_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was compiled with another interface is named, and torch runs; nothing slower is taken in its place."""
    loaded_anew.setattr(library, "INTERFACE", 1000)
    info = info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path))
    assert info.kernels == "torch"
    assert "compiled with another version of the package" in info.kernels_reason


@here
def test_every_instruction_set_is_compiled() -> None:
    """Where one is: a source that compiles for one alone would leave other processors to torch."""
    assert [name for name in library.INSTRUCTION_SETS if "compiled" in (library.why_not(name) or "")] == []


def test_every_structure_of_the_interface_is_compared() -> None:
    """Its size, on both sides."""
    declared = {one for one in vars(library).values() if isinstance(one, type) and issubclass(one, ctypes.Structure)}
    assert declared == set(library.STRUCTURES)


@here
def test_what_runs_goes_by_the_name_it_is_asked_for_by(instructions: str) -> None:
    """Tiles with their own set alone, so that what is measured without them was without them."""
    assert library.instruction_set() == instructions
    assert library.tiles() == (library.AMX if instructions.endswith("+amx") else library.NO_TILES)


@here
def test_an_instruction_set_that_is_asked_for(loaded_anew: pytest.MonkeyPatch) -> None:
    """One that is not known, or that the CPU lacks, is refused with the variable's name."""
    library.use_instruction_set("sse2")
    with pytest.raises(library.NotNative, match=r"MLFLOW_LLM_INSTRUCTION_SET is 'sse2', not one of"):
        library.required()
    name = list(library.INSTRUCTION_SETS)[-1]
    loaded_anew.setattr(library, "_load", library._lacks)
    library.use_instruction_set(name)
    with pytest.raises(library.NotNative, match=rf"INSTRUCTION_SET is '{name}': the CPU lacks"):
        library.required()
    library.use_instruction_set("")
    with pytest.raises(library.NotNative, match=rf"^{library._lacks(name)}$"):
        library.required()


def test_sve_is_chosen_by_name_alone(loaded_anew: pytest.MonkeyPatch) -> None:
    """Where all of ARM's sets run; where it does not, whoever asks for it is told why, and nobody else."""
    kernels = SimpleNamespace(mlflow_llm_use_byte_products=lambda use: use, mlflow_llm_use_tiles=lambda use: use)
    loaded_anew.setattr(library, "INSTRUCTION_SETS", library.ARM)
    loaded_anew.setattr(library, "_load", lambda name: kernels)
    assert [library._chosen(name)[1] for name in ("", "sve", "sve-i8mm")] == ["neon-i8mm", "sve", "sve-i8mm"]
    library._chosen.cache_clear()
    loaded_anew.setattr(library, "_load", library._lacks)
    assert library._chosen("") == (library._lacks("neon"), "")
    assert library._chosen("sve") == (f"MLFLOW_LLM_INSTRUCTION_SET is 'sve': {library._lacks('sve')}", "")


def test_a_library_that_its_compiler_could_not_make(loaded_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Is said to lack one, beside others that are there."""
    loaded_anew.setattr(library, "INSTRUCTION_SETS", library.ARM)
    loaded_anew.setattr(library, "_path", lambda instructions: tmp_path / instructions.file)
    assert "built without a compiler, or by one that does not know these" in str(library.why_not("sve"))


def test_the_survey_of_a_child_process() -> None:
    """What ``doctor`` asks: the package that engines import, and whether its kernels run."""
    command, environment = child.python_command("serving.engine.native.survey"), child.environment()
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=True)
    found = json.loads(done.stdout)
    assert found["package"] == child.package_place()
    assert found["kernels"] == ("torch" if library.library() is None else "native")
