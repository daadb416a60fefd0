"""``mlflow-llm doctor``: what a server would find here."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import psutil

from ..http.gunicorn.listen_addresses import try_address
from ..interface.bundle import Bundle
from ..interface.errors import PackagingError, ServingError
from ..system import child
from ..system.cpus import available_cpus, num_threads
from ..system.main_memory import main_memory

PACKAGES = (
    "mlflow-llm",
    "mlflow",
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "msgspec",
    "pyzmq",
    "flask",
    "gunicorn",
    "gevent",
    "sqlalchemy",
    "prometheus_client",
)
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "asimd", "sve")
Section = dict[str, Any]


@click.command()
@click.option("-m", "--model-uri", help="Also load this model and generate a token.")
@click.option("--engine-python", help="Also check that this interpreter can run engines in vLLM.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(model_uri: str | None, engine_python: str | None, as_json: bool) -> None:
    """Check whether this machine can run a server.

    Shows versions, threads, memory and limits. With -m, also loads the model and generates a token. The exit status is
    1 if something is missing or the model generates no token. With --engine-python, also starts that interpreter as an
    engine in vLLM would be started.
    """
    found: dict[str, Section] = {"versions": versions(), "machine": machine(), "limits": limits(), "engine": engine()}
    problems = _problems(found)
    notes = _notes(found["engine"])
    if engine_python is not None:
        found["vllm"] = vllm(engine_python)
        if "reason" in found["vllm"]:
            problems.append(f"{engine_python} cannot run engines in vLLM: {found['vllm']['reason']}")
    if model_uri is not None:
        try:
            found["model"] = try_model(model_uri)
        except (ServingError, PackagingError) as error:
            problems.append(f"{model_uri}: {error}")
    if as_json:
        click.echo(json.dumps({**found, "notes": notes, "problems": problems}, indent=2))
    else:
        _show(found)
        for note in notes:
            click.echo(f"note: {note}")
        for problem in problems:
            click.echo(f"problem: {problem}")
        if not problems:
            click.echo("no problems found")
    if problems:
        raise SystemExit(1)


def versions() -> Section:
    """Return the versions of Python and of every package a server needs; None for a missing one."""
    found: Section = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def machine() -> Section:
    return {
        "system": platform.platform(),
        "CPU": _cpu_model(),
        "instructions": ", ".join(_instructions()) or "unknown",
        "cores": str(available_cpus()),
        "threads": f"{num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})",
        "accelerator": _accelerator(),
        "memory": str(main_memory()),
    }


def limits() -> Section:
    """Return this user's system limits: a server needs a file for each connection and a place for its sockets."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    place = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return {
        "open files": files,
        "address space": "unlimited" if space == resource.RLIM_INFINITY else f"{space / 2**30:.1f} GiB",
        "runtime directory": place if os.access(place, os.W_OK | os.X_OK) else f"{place} (not writable)",
        "port 8000": "free" if _free(8000) else "taken",
    }


def engine() -> Section:
    """Return what a process started like an engine's finds: which package it imports, and whether torch and our
    kernels run there."""
    command = child.python_command("serving.engine.native.survey")
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", env=child.environment(), check=False
    )
    try:
        found: Section = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return {"kernels": None, "reason": lines[-1][:300] if lines else f"exit status {done.returncode}"}
    return found


def vllm(python: str) -> Section:
    """Return what a process that is started like an engine in vLLM finds in the interpreter ``python``."""
    with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as folder:
        command = child.python_command("serving.engine.vllm.survey", python=python)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/",
                env=child.lean_environment(folder), check=False,
            )  # fmt: skip
        except OSError as error:
            return {"reason": error.strerror or str(error)}
    try:
        found: Section = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines()
        return {"reason": lines[-1][:300] if lines else f"exit status {done.returncode}"}
    return found


def _notes(engine: Section) -> list[str]:
    if engine["kernels"] != "torch":
        return []
    return [f"on this machine engines run torch's kernels, which are slower than the native ones: {engine['reason']}"]


def _problems(found: dict[str, Section]) -> list[str]:
    problems = [f"{name} is not installed" for name, number in found["versions"].items() if number is None]
    if found["engine"]["kernels"] is None:
        problems.append(f"an engine process does not start: {found['engine']['reason']}")
    if found["limits"]["open files"] < 1024:
        problems.append(f"only {found['limits']['open files']} open files are allowed: raise ulimit -n to 1024 or more")
    if "not writable" in found["limits"]["runtime directory"]:
        problems.append("engines have no directory for their sockets: set XDG_RUNTIME_DIR to one that you can write to")
    return problems


def try_model(uri: str) -> Section:
    """Load the model in an engine process, as a server would. Raises ``PackagingError``, ``ServingError``."""
    from ..supervision.warm_up import generate_one
    from ..transport.client.client import connect
    from .model_options import endpoint_specs

    (spec,) = endpoint_specs({"doctor": uri}, {})
    started = time.monotonic()
    with connect(spec.bundle, spec.engine, progress=lambda stage: click.echo(f"engine: {stage}", err=True)) as engine:
        ready = time.monotonic() - started
        seconds = generate_one(engine)
        info = engine.info
        return {
            "uri": uri,
            "tasks": ", ".join(info.tasks),
            "weights": f"{info.dtype} on {info.device}, quantization {info.quantization}",
            "keys and values": info.kv_cache_summary or "none",
            "kernels": f"{info.kernels_summary}, {info.threads} threads",
            "adapters": ", ".join(adapter.name for adapter in engine.adapters()) or "none",
            "tool calls": _tool_formats(spec.bundle, spec.engine.trust_remote_code),
            "context": f"{info.max_model_len} tokens, {info.max_num_seqs} sequences, KV for {info.max_kv_tokens}",
            "engine": f"ready in {ready:.2f} s, {psutil.Process(info.pid).memory_info().rss / 2**30:.2f} GiB resident",
            "token": f"generated in {seconds:.3f} s",
        }


def _tool_formats(bundle: Bundle, trust_remote_code: bool) -> str:
    """Return how the model's calls are written, after each of its chat templates."""
    from ..tasks.prompt.text import TextModel

    text = TextModel(bundle, trust_remote_code=trust_remote_code)
    found = {name: text.tool_format(name) for name in text.templates}
    return ", ".join(f"{format.name} ({name})" for name, format in found.items()) or "none without a chat template"


def _show(found: dict[str, Section]) -> None:
    for name, section in found.items():
        click.echo(f"{name}")
        for key, value in section.items():
            if value == "":  # no reason why not
                continue
            click.echo(f"  {key:<18} {'missing' if value is None else value}")


def _cpuinfo() -> dict[str, str]:
    """Return the first CPU's lines of /proc/cpuinfo, if there is one."""
    path = Path("/proc/cpuinfo")
    text = path.read_text().split("\n\n")[0] if path.exists() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_model() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _instructions() -> list[str]:
    flags = set((_cpuinfo().get("flags") or _cpuinfo().get("Features") or "").split())
    return [name for name in INSTRUCTIONS if name in flags]


def _accelerator() -> str:
    try:
        import torch
    except ImportError:
        return "unknown without torch"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _free(port: int) -> bool:
    try:
        try_address(("127.0.0.1", port))
    except OSError:
        return False
    return True
