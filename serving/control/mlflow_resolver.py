"""Resolve model URIs to bundles with MLflow. Like ``prompt_process``, it imports MLflow in a process of its own.

``python -m mlflow_llm.serving.control.mlflow_resolver URI… [--texts URI…]`` runs in a separate process and prints one
JSON object, so that the server's own processes do not import MLflow, which would cost each of them seconds and a few
hundred megabytes. The weights of URIs after ``--texts`` are not fetched: their engines are on other hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ..dialects.fields.defaults import request_defaults
from ..interface.bundle import Bundle, draft_of
from ..interface.errors import InvalidField, ModelNotFound, NotFound, PackagingError
from ..interface.request import POOLED
from ..interface.settings import GRANTED, EngineSettings
from ..system import child

# engine settings that encoders refuse, with their defaults
OF_GENERATION = {"kv_cache_dtype": "auto", "kv_block_size": None, "draft_model": None}


class ResolvedModel(Struct, frozen=True, kw_only=True):
    """A model that was found. ``config`` is the saved ``model_config``, which includes engine settings; ``uri`` names
    a version, never an alias."""

    bundle: Bundle
    config: dict[str, object] = {}
    uri: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        """Default values of request fields: those that the model was logged with override those of its
        ``generation_config.json``."""
        layers: list[Any] = [self.config.get(name) or {} for name in ("generation_config", "defaults")]
        return request_defaults(*layers)

    @property
    def generates(self) -> bool:
        return not POOLED.issuperset(self.bundle.tasks)

    def unused(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server-wide engine settings that this model has no use for."""
        given = {} if self.generates else overrides
        return {k: v for k, v in given.items() if k in OF_GENERATION and v != OF_GENERATION[k]}

    def settings(self, overrides: dict[str, Any], own: Mapping[str, Any] | None = None) -> EngineSettings:
        """Return the engine settings for this model. Raises ``PackagingError``.

        ``overrides``, the server-wide settings that the model has a use for, override the saved settings; ``own``, the
        served entity's settings, override both. A model cannot grant itself what is ``GRANTED``: the people who write
        to a registry are not those who run the servers.
        """
        unused = self.unused(overrides)
        given = EngineSettings.renamed({k: v for k, v in overrides.items() if k not in unused} | dict(own or {}))
        known = set(EngineSettings.__struct_fields__) - {"in_process"}  # in_process is for notebooks
        saved = {k: v for k, v in EngineSettings.renamed(self.config).items() if k in known and v is not None}
        if saved.get("trust_remote_code") and "trust_remote_code" not in given:
            raise PackagingError(
                "the model was logged with trust_remote_code: it brings code of its own, which runs only where the "
                "server is started with -C trust_remote_code=true"
            )
        for name in GRANTED:
            if saved.get(name) and name not in given:
                raise PackagingError(
                    f"the model was logged with {name}, which decides about code that runs here; it holds only where "
                    f"the server is started with -C {name}=…"
                )
        try:
            return EngineSettings.read(saved | given)
        except InvalidField as error:
            raise PackagingError(f"engine settings: {error}") from None


TEXTS = "--texts"


def resolve(
    uris: tuple[str, ...], texts: tuple[str, ...] = (), *, timeout: float | None = None
) -> tuple[ResolvedModel, ...]:
    """Return the models of URIs or local directories, followed by those of ``texts``, without their weights.

    Raises ``PackagingError`` (also after ``timeout`` seconds), or ``NotFound`` if a model does not exist.
    """
    output, status = run_lookup(child.python_command("serving.control.mlflow_resolver", *uris, TEXTS, *texts), timeout)
    lines = output.decode().strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise PackagingError(f"reading the model failed with exit status {status}") from None
    if answer.get("missing"):
        raise NotFound(answer["error"])
    if "error" in answer:
        raise PackagingError(answer["error"])
    return msgspec.convert(answer["models"], tuple[ResolvedModel, ...])


def with_drafts(
    bundles: Sequence[Bundle], engines: Sequence[EngineSettings], find: Callable[..., tuple[ResolvedModel, ...]]
) -> tuple[Bundle, ...]:
    """Return ``bundles``, each with the draft model that its engine's settings name, if any.

    ``find`` is called like ``resolve`` and raises the same errors.
    """
    uris = tuple(dict.fromkeys(engine.draft_model for engine in engines if engine.draft_model is not None))
    if not uris:
        return tuple(bundles)
    found = {uri: draft_of(uri, model.bundle) for uri, model in zip(uris, find(uris), strict=True)}
    return tuple(
        bundle if engine.draft_model is None else msgspec.structs.replace(bundle, draft=found[engine.draft_model])
        for bundle, engine in zip(bundles, engines, strict=True)
    )


def run_lookup(command: list[str], timeout: float | None) -> tuple[bytes, int]:
    try:
        return run_child(command, timeout)
    except subprocess.TimeoutExpired:
        raise PackagingError(f"reading the model took longer than resolve_timeout, {timeout:g} seconds") from None


def run_child(command: list[str], timeout: float | None, *, pass_fds: tuple[int, ...] = ()) -> tuple[bytes, int]:
    """Run ``command`` and return its output and exit status. Raises ``subprocess.TimeoutExpired``.

    The process ends with this one, however this one ends: its standard input is a pipe that only this process holds
    open. It has its own session, so that Ctrl-C only reaches this process, which then kills it and what it started.
    """
    lifeline, held = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            stdin=lifeline,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=child.environment(),
            pass_fds=pass_fds,
        )
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(lifeline)
    with process:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            os.close(held)
    return output, process.returncode


def end_with_parent(lifeline: int = 0) -> None:
    """End this process and its process group when no process holds the other end of the pipe ``lifeline`` open."""

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main(words: list[str]) -> int:
    """Print the models or the error as one line of JSON, and return the exit status.

    MLflow is only imported for a model that is not a directory on this machine, or that is not logged yet.
    """
    from mlflow_llm.flavors.llm.model.bundle_reader import configured

    try:
        found = []
        weights = True
        for word in words:
            if word == TEXTS:
                weights = False
                continue
            root, fixed = _root(word, weights=weights)
            bundle, config = configured(root, weights=weights)
            check_defaults(config.request_defaults, bundle)
            found.append(ResolvedModel(bundle=bundle, config=config.to_dict(), uri=fixed))
    except _expected() as error:
        missing = isinstance(error, ModelNotFound) or getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"
        print(json.dumps({"error": str(error)[:500], "missing": missing}))
        return 1
    print(json.dumps({"models": msgspec.to_builtins(found)}))
    return 0


def _expected() -> tuple[type[Exception], ...]:
    """Return the errors that are reported as answers; MLflow's only if MLflow was imported."""
    module = sys.modules.get("mlflow.exceptions")
    return (PackagingError, OSError) if module is None else (PackagingError, OSError, module.MlflowException)


def _root(uri: str, *, weights: bool) -> tuple[Path, str]:
    """Return a model's folder and its URI with a version. A model that is not logged yet is logged into the user's
    cache."""
    from mlflow_llm.flavors.llm.load.model_cache import logged
    from mlflow_llm.flavors.llm.model.fetch import local_root
    from mlflow_llm.flavors.llm.model.model_registry import pinned

    made = logged(uri)
    if made is not None:
        return made, uri
    fixed = uri if os.path.isdir(uri) else pinned(uri)
    return local_root(fixed, weights=weights), fixed


def check_defaults(values: dict[str, Any], bundle: Bundle) -> None:
    """Check a model's request defaults before any request uses them. Raises ``PackagingError``."""
    from ..dialects.fields.defaults import defaults_of

    read = defaults_of(values)
    try:
        for task in bundle.tasks:
            read(task)
    except InvalidField as error:
        raise PackagingError(f"defaults: {error}") from None


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
