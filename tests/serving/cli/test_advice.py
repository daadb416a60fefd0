"""A table of mistakes that people bring from other programs, and the text that each must get."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlflow_llm.flavors.llm.model import model_config, model_registry
from mlflow_llm.serving.cli import advice, cli, vllm_only
from mlflow_llm.serving.cli.convert import vllm_flags
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering.store import checks
from mlflow_llm.serving.metering.store.checks import NoStore

MISTAKES = [  # a command, and what its error must contain
    ("serve m --max-model-len 4096", "write -C max_model_len=…"),
    ("serve m --max-num-seqs 8", "write -C max_num_seqs=…"),
    ("serve m --max-num-batched-tokens 512", "write -C max_num_batched_tokens=…"),
    ("serve m --dtype bfloat16", "write -C dtype=…"),
    ("serve m --quantization int8", "write -C quantization=…"),
    ("serve m --kv-cache-dtype int8", "write -C kv_cache_dtype=…"),
    ("serve m --gpu-memory-utilization 0.9", "write -C kv_cache_memory=… (a number of bytes, such as 8GiB)"),
    ("serve m --kv-cache-memory-bytes 1", "write -C kv_cache_memory=…"),
    ("serve m --block-size 16", "write -C kv_block_size=…"),
    ("serve m --trust-remote-code", "write -C trust_remote_code=…"),
    ("serve m --device cpu", "write -C device=…"),
    ("serve m --max-loras 4", "write -C max_adapters=…"),
    ("serve m --max-cpu-loras 4", "write -C adapter_host_memory=…"),
    ("serve m --speculative-config x", "write -C draft_model=… (the model's directory or URI)"),
    ("serve m --mm-processor-cache-gb 4", "write -C encoder_cache=… (a number of bytes, such as 4GiB)"),
    ("serve m --async-scheduling", "write -C async_scheduling=…"),
    ("serve m --enforce-eager", "write -C cuda_graphs=none"),
    ("serve m --enable-prefix-caching", "it is on; -C prefix_caching=false turns it off"),
    ("serve m --no-enable-prefix-caching", "write -C prefix_caching=false"),
    ("serve m --served-model-name chat", "write --name NAME, or MODEL=NAME"),
    ("serve m --api-key x", "write --require-keys, with keys made by `mlflow-llm keys create`"),
    ("serve m --ssl-certfile x", "write --tls-cert"),
    ("serve m --ssl-keyfile x", "write --tls-key"),
    ("serve m --ssl-ca-certs x", "write --tls-client-ca"),
    ("serve m --uds x", "write --socket"),
    ("serve m --allowed-origins x", "write --cors-origin"),
    ("serve m --uvicorn-log-level x", "write --log-level"),
    ("serve m --api-server-count 2", "write --workers"),
    ("serve m --enable-lora", "adapters are logged with the model"),
    ("serve m --lora-modules a=b", "write llm.log_model(adapters={…})"),
    ("serve m --chat-template x", "the template is logged with the model"),
    ("serve m --tool-call-parser hermes", "the format of calls follows from the chat template"),
    ("serve m --enable-auto-tool-choice", "tools work without it"),
    ("serve m --generation-config vllm", "write -D FIELD=VALUE"),
    ("serve m --override-generation-config x", "write -D FIELD=VALUE"),
    ("serve m --seed 1", "write -D seed=…"),
    ("serve m --allowed-local-media-path x", "write --allowedLocalMediaPath"),
    ("serve m --download-dir x", "MLFLOW_LLM_CACHE"),
    ("serve m --config x.yaml", "expected KEY=VALUE"),
    ("serve m --num-ctx 4096", "write -C max_model_len=…"),
    ("serve m --num-parallel 4", "write -C max_num_seqs=…"),
    ("serve m --max-queue 4", "write --max-queued"),
    ("serve m --max-lora-rank 16", "it is not needed: adapters of any rank are served"),
    ("serve m --reasoning-parser qwen3", "it is not needed: the format of reasoning follows from the chat template"),
    ("serve m --tensor-parallel-size 2", "; an engine uses one device; -C engine=vllm with engine_args takes it"),
    ("serve m --rope-scaling x", "change config.json, and log that directory"),
    ("run m --keepalive 5m", "write -C idle_timeout=… (seconds)"),
    ("run m --verbose", "write --stats"),
    ("chat --api-key x", "write --key"),
    ("chat --base-url x", "write --url"),
    ("serve m -C max-model-len=4096", "write -C max_model_len=…"),
    ("serve m -C gpu_memory_utilization=0.9", "write -C kv_cache_memory=…"),
    ("serve m -C max_num_seq=4", "did you mean 'max_num_seqs'?"),
    ("limits set tenant a rpm=5 --database sqlite://{tmp}/x.db", "rpm is qpm here"),
    ("limits set tenant a tpm=5 --database sqlite://{tmp}/x.db", "tpm is itpm for input tokens and otpm for output"),
    (
        "limits set tenant a max_parallel_requests=5 --database sqlite://{tmp}/x.db",
        "max_parallel_requests is in_flight",
    ),
    ("list", "No such command 'list'; write mlflow-llm models"),
    ("show m", "write mlflow-llm doctor -m MODEL"),
    ("create m", "write llm.log_model(model=…)"),
    ("run-batch", "write mlflow-llm batch"),
    ("prune", "write mlflow-llm models prune"),
    ("delete m", "write mlflow-llm rm NAME"),
    ("kill m", "write mlflow-llm stop NAME"),
    ("status", "write mlflow-llm ps"),
]
NO_ADVICE = ("serve m --nothing-like-this", "keys list --max-model-len 5", "run m --max-lora-rank 16")


@pytest.mark.parametrize(("line", "text"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_gets_its_text(line: str, text: str, tmp_path: Path) -> None:
    """A word of another program is refused with what to write here."""
    done = CliRunner().invoke(cli, line.format(tmp=f"/{tmp_path}").split())
    told = done.stderr or str(done.exception)
    assert done.exit_code != 0
    assert text in " ".join(told.split()), told


@pytest.mark.parametrize("line", NO_ADVICE)
def test_no_advice_where_none_fits(line: str) -> None:
    """A flag without a counterpart, or of a command that has none, is refused without advice."""
    done = CliRunner().invoke(cli, line.split())
    assert done.exit_code == 2
    assert "No such option" in done.stderr
    assert "write" not in done.stderr


@pytest.mark.parametrize("flag", sorted({*vllm_flags.CONVERSIONS, *vllm_only.NO_EFFECT, *vllm_only.NO_COUNTERPART}))
def test_every_flag_that_import_vllm_knows_is_known_to_serve(flag: str) -> None:
    """A flag of vLLM is an option here, or its refusal says what to write instead, or why there is none."""
    command = cli.commands["serve"]
    if flag not in {name for one in command.params for name in one.opts}:
        assert advice.for_option(command, flag) or advice.why_absent(command, flag)


def test_advice_names_what_there_is() -> None:
    """Every setting, option and command that advice names exists."""
    assert set(advice.CONFIG.values()) <= set(EngineSettings.__struct_fields__)
    serve = {name for one in cli.commands["serve"].params for name in one.opts}
    named = {text.split()[0].rstrip(",") for text in advice.SERVE.values() if text.startswith("--")}
    assert named <= serve
    commands = {text.split()[1].rstrip(",") for text in advice.COMMANDS.values() if text.startswith("mlflow-llm ")}
    assert commands <= set(cli.commands)
    assert not set(advice.COMMANDS) & set(cli.commands)
    assert not set(advice.SERVE) & serve - {"--config"}


@pytest.mark.parametrize(("size", "number"), [("1GiB", 2**30), ("1GB", 10**9), ("512M", 512 * 10**6), (7, 7)])
def test_sizes_of_settings(size: str | int, number: int) -> None:
    """Every engine setting in bytes takes a size with its unit."""
    names = [name for name, _, allowed in EngineSettings.described() if allowed.startswith("a number of bytes")]
    assert len(names) >= 5
    read = EngineSettings.read(dict.fromkeys(names, size))
    assert [getattr(read, name) for name in names] == [number] * len(names)


def test_sizes_in_a_spec(tmp_path: Path) -> None:
    """A spec file takes sizes with units, too."""
    from mlflow_llm.serving.cli.serve.spec_files import read_serve_spec

    file = tmp_path / "spec.json"
    file.write_text('{"settings": {"engine_memory_budget": "12GiB"}, "engine": {"kv_cache_memory": "1GiB"}}')
    spec = read_serve_spec(str(file))
    assert spec.settings.engine_memory_budget == 12 * 2**30
    assert spec.engine == {"kv_cache_memory": 2**30}


@pytest.mark.parametrize(
    ("name", "here"),
    [("transformers_model", "model"), ("torch_dtype", "dtype"), ("inference_config", "generation_config")],
)
def test_arguments_of_mlflow_transformers(name: str, here: str) -> None:
    """An argument of mlflow.transformers.log_model is refused with its name here."""
    with pytest.raises(PackagingError, match=f"'{name}' is not a setting; {here} is its name here"):
        model_config.parse({name: "x"})


def test_postgresql_without_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database whose driver is not installed gets the line that installs it."""
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(NoStore, match=r"pip install 'mlflow-llm\[postgres\]'"):
        checks.parsed("postgresql://localhost/x")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_tracking_server_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command says that the server does not answer, without the minutes of retries of MLflow's client."""
    url = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mlflow_llm.serving.cli", "run", "assistant", "Hello"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    assert time.monotonic() - began < 120
    assert done.returncode == 1
    assert f"no MLflow server answers at {url} (Connection refused)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_behind_a_proxy_is_not_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a proxy the server may answer although no connection to it can be made from here."""
    url = f"http://127.0.0.1:{closed_port()}"
    assert model_registry.why_unreachable(url) == "Connection refused"
    monkeypatch.setattr(model_registry, "getproxies", lambda: {"http": "http://proxy"})
    monkeypatch.setattr(model_registry, "proxy_bypass", lambda host: False)
    assert model_registry.why_unreachable(url) is None
    assert model_registry.why_unreachable("sqlite:///x.db") is None
