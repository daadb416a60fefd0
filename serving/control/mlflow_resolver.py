"""Where MLflow meets the server: model URIs become bundles. The only module of the server that imports MLflow.

``python -m mlflow_llm.serving.control.mlflow_resolver URI… [--texts URI…]`` runs in a process of its own and prints one
JSON object: the server's own processes need no MLflow, whose import would cost each of them seconds and a few hundred
megabytes. Of URIs after ``--texts`` the weights stay where they are: their engines are on other hosts.
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

from .. import child
from ..bundle import Bundle, draft_of
from ..dialects.defaults import request_defaults
from ..errors import InvalidField, ModelNotFound, NotFound, PackagingError
from ..request import POOLED
from ..settings import EngineSettings

# engine settings that encoders refuse, with their defaults
OF_GENERATION = {"kv_cache_dtype": "auto", "kv_block_size": None, "draft_model": None}


class ResolvedModel(Struct, frozen=True, kw_only=True):
    """A model that was found. ``config`` is the saved ``model_config`` (engine settings among it); ``uri`` names a
    version, never an alias."""

    bundle: Bundle
    config: dict[str, object] = {}
    uri: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        """Request fields for requests that lack them: of the model's ``generation_config.json``, under those that it
        was logged with."""
        layers: list[Any] = [self.config.get(name) or {} for name in ("generation_config", "defaults")]
        return request_defaults(*layers)

    @property
    def generates(self) -> bool:
        return not POOLED.issuperset(self.bundle.tasks)

    def unused(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a whole server's engine settings that this model has no use for."""
        given = {} if self.generates else overrides
        return {k: v for k, v in given.items() if k in OF_GENERATION and v != OF_GENERATION[k]}

    def settings(self, overrides: dict[str, Any], own: Mapping[str, Any] | None = None) -> EngineSettings:
        """The saved engine settings under ``overrides``, those of a whole server, as far as they are of use, under
        ``own`` of the served entity. Raises ``PackagingError``.

        A model does not grant itself ``trust_remote_code``: who writes to a registry is not who runs its servers.
        """
        unused = self.unused(overrides)
        given = {k: v for k, v in overrides.items() if k not in unused} | dict(own or {})
        known = set(EngineSettings.__struct_fields__) - {"in_process"}  # which is for notebooks
        saved = {k: v for k, v in self.config.items() if k in known and v is not None}
        if saved.get("trust_remote_code") and "trust_remote_code" not in given:
            raise PackagingError(
                "the model was logged with trust_remote_code: it brings code of its own, which runs only where the "
                "server is started with -C trust_remote_code=true"
            )
        try:
            return EngineSettings.read(saved | given)
        except InvalidField as error:
            raise PackagingError(f"engine settings: {error}") from None


TEXTS = "--texts"


def resolve(
    uris: tuple[str, ...], texts: tuple[str, ...] = (), *, timeout: float | None = None
) -> tuple[ResolvedModel, ...]:
    """The bundles of model URIs or local directories, then those of ``texts``, without weights, within ``timeout``
    seconds. Raises ``PackagingError``, or ``NotFound`` for no such model."""
    output, status = _run(child.python_command("serving.control.mlflow_resolver", *uris, TEXTS, *texts), timeout)
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
    """Each of ``bundles`` with the draft model that its engine's settings name, where they name one; ``find`` is
    ``resolve``. Raises as it does."""
    uris = tuple(dict.fromkeys(engine.draft_model for engine in engines if engine.draft_model is not None))
    if not uris:
        return tuple(bundles)
    found = {uri: draft_of(uri, model.bundle) for uri, model in zip(uris, find(uris), strict=True)}
    return tuple(
        bundle if engine.draft_model is None else msgspec.structs.replace(bundle, draft=found[engine.draft_model])
        for bundle, engine in zip(bundles, engines, strict=True)
    )


def _run(command: list[str], timeout: float | None) -> tuple[bytes, int]:
    """What it writes, and its exit status. It ends with us, however we end: its standard input is a pipe that only we
    hold open. In a session of its own: Ctrl-C is ours to answer, and ends it, and what it started, without a trace."""
    lifeline, held = os.pipe()
    try:
        process = subprocess.Popen(
            command, stdin=lifeline, stdout=subprocess.PIPE, start_new_session=True, env=child.environment()
        )
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(lifeline)
    with process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise PackagingError(f"reading the model took longer than resolve_timeout, {timeout:g} seconds") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            os.close(held)
    return output, process.returncode


def end_with_parent(lifeline: int = 0) -> None:
    """End this process, and its session's others, when the other end of the pipe ``lifeline`` is closed everywhere."""

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main(words: list[str]) -> int:
    """Print what was found, or the error, as one line of JSON; the exit status.

    MLflow is imported for a model that is no directory of this machine, and for one that is not logged yet.
    """
    from mlflow_llm.flavors.llm.bundle_reader import configured

    try:
        found = []
        weights = True
        for word in words:
            if word == TEXTS:
                weights = False
                continue
            root, fixed = _root(word, weights=weights)
            bundle, config = configured(root, weights=weights)
            _check_defaults(config.request_defaults, bundle)
            found.append(ResolvedModel(bundle=bundle, config=config.to_dict(), uri=fixed))
    except _expected() as error:
        missing = isinstance(error, ModelNotFound) or getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"
        print(json.dumps({"error": str(error)[:500], "missing": missing}))
        return 1
    print(json.dumps({"models": msgspec.to_builtins(found)}))
    return 0


def _expected() -> tuple[type[Exception], ...]:
    """The errors that are answers; MLflow's where it was imported, and can have raised one."""
    module = sys.modules.get("mlflow.exceptions")
    return (PackagingError, OSError) if module is None else (PackagingError, OSError, module.MlflowException)


def _root(uri: str, *, weights: bool) -> tuple[Path, str]:
    """The folder of a model, and its URI with a version; what is not logged yet is logged into the user's cache."""
    from mlflow_llm.flavors.llm.fetch import local_root
    from mlflow_llm.flavors.llm.model_cache import logged
    from mlflow_llm.flavors.llm.model_registry import pinned

    made = logged(uri)
    if made is not None:
        return made, uri
    fixed = uri if os.path.isdir(uri) else pinned(uri)
    return local_root(fixed, weights=weights), fixed


def _check_defaults(values: dict[str, Any], bundle: Bundle) -> None:
    """Before a request meets them. Raises ``PackagingError``."""
    from ..dialects.defaults import defaults_of

    read = defaults_of(values)
    try:
        for task in bundle.tasks:
            read(task)
    except InvalidField as error:
        raise PackagingError(f"defaults: {error}") from None


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
