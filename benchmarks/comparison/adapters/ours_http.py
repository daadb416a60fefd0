"""`mlflow-llm serve` of the logged model over HTTP: one worker and the engine's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from load import LlmServe

from comparison.adapters.http_streams import HttpStreams
from comparison.drive import serve, versions
from comparison.kernels import require_served_natively


def saved(model: str, store: Path) -> Path:
    """Save the model in MLflow's form, completely or not at all."""
    path = store / "mlflow-llm"
    if not path.is_dir():
        import mlflow_llm.flavors.llm as flavor

        unfinished = store / ".mlflow-llm"
        flavor.save_model(str(unfinished), model=model, pip_requirements=[])
        unfinished.rename(path)
    return path


def body(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "compare",
        "prompt": request["prompt"],
        "max_tokens": request["max_tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def read(event: dict[str, Any]) -> tuple[list[int], str]:
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    return [], "".join(choice.get("text", "") for choice in event["choices"])


def load(model: str, options: dict[str, Any]) -> HttpStreams:
    path = saved(model, Path(options.pop("store")))
    settings = [part for name, value in options.items() for part in ("-C", f"{name}={value}")]
    common = ("--workers", "1", "--log-level", "warning", "-C", "speculation=none")
    server = LlmServe("-m", str(path), "--name", "compare", *common, *settings)
    server.__enter__()
    try:
        require_served_natively(server.url, "compare")
    except BaseException:
        server.__exit__()
        raise
    told = {**versions("mlflow-llm", "torch"), "ready after s": f"{server.ready_after:.1f}"}
    return HttpStreams(server.port, "/v1/completions", body, read, told, server.__exit__)


if __name__ == "__main__":
    serve(load)
