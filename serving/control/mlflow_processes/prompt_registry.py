"""MLflow's prompt registry as the server offers it, where ``MLFLOW_TRACKING_URI`` or ``MLFLOW_REGISTRY_URI`` names one.

Each question is asked by a process of its own (``prompt_process``), one at a time in each worker, within a time limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from ...interface.errors import Conflict, NotFound, Overloaded, RequestError, ServingError, Unavailable
from ...system import child
from ..mlflow_resolver import run_child

VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
TIMEOUT_SECONDS = 60.0  # seconds for a question, and the same for the wait for its turn
MAX_QUESTIONS = 16  # questions of a worker, including the one that is being asked
RETRY_SECONDS = 5.0
MAX_SHOWN = 500  # characters of MLflow's own words
ERRORS: Mapping[str, type[ServingError]] = {"missing": NotFound, "invalid": RequestError, "conflict": Conflict}


class PromptInfo(TypedDict):
    """A prompt of the registry."""

    name: str
    description: str


class PromptList(TypedDict):
    """Prompts by name; ``more`` says that there are others."""

    prompts: list[PromptInfo]
    more: bool


class PromptMessage(TypedDict):
    """A message of a chat prompt, with variables such as ``{{name}}``."""

    role: str
    content: str


class PromptVersionInfo(TypedDict):
    version: int
    commit_message: str
    created_ms: int | None


class PromptDetails(TypedDict):
    """A version of a prompt. ``template`` is a text or the messages of a chat; ``versions`` are the newest ones."""

    name: str
    version: int
    template: str | list[PromptMessage]
    variables: list[str]
    commit_message: str
    response_format: dict[str, Any] | None
    model_config: dict[str, Any] | None
    versions: list[PromptVersionInfo]


def is_configured() -> bool:
    """Return whether the environment names a store of MLflow's."""
    return any(os.environ.get(name) for name in VARIABLES)


class PromptRegistry:
    """A client of the registry. It is safe for threads, and for greenlets if gevent has patched the process.

    Its methods raise ``NotFound``, ``RequestError`` or ``Conflict`` for what MLflow refuses, and ``Unavailable`` if the
    registry does not answer in time.
    """

    def __init__(
        self, *, timeout: float = TIMEOUT_SECONDS, ask: Callable[[Mapping[str, Any], float], Any] | None = None
    ) -> None:
        self._timeout, self._ask = timeout, ask or _ask
        self._turn, self._waiting = threading.BoundedSemaphore(), threading.BoundedSemaphore(MAX_QUESTIONS)

    def search(self, words: str, limit: int) -> PromptList:
        found: PromptList = self._call("search", {"words": words, "limit": limit})
        return found

    def load(self, name: str, version: str) -> PromptDetails:
        found: PromptDetails = self._call("load", {"name": name, "version": version})
        return found

    def save(self, given: Mapping[str, Any]) -> PromptDetails:
        """Save a version; ``given`` are arguments of MLflow's ``register_prompt``."""
        found: PromptDetails = self._call("save", given)
        return found

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        busy = Overloaded("others are asking the prompt registry", retry_after=RETRY_SECONDS)
        if not self._waiting.acquire(blocking=False):
            raise busy
        try:
            if not self._turn.acquire(timeout=self._timeout):
                raise busy
            try:
                found = self._ask({"call": name, "arguments": arguments}, self._timeout)
            finally:
                self._turn.release()
        finally:
            self._waiting.release()
        if "error" not in found:
            return found
        words = str(found["error"])[:MAX_SHOWN]
        kind = ERRORS.get(found["kind"])
        raise Unavailable(words, retry_after=RETRY_SECONDS) if kind is None else kind(words)


def _ask(question: Mapping[str, Any], timeout: float) -> Any:
    """Ask in a process. The question is in a file without a name: arguments of processes can be read by all users."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(question).encode())
        file.seek(0)
        command = child.python_command("serving.control.mlflow_processes.prompt_process", str(file.fileno()))
        try:
            output, status = run_child(command, timeout, pass_fds=(file.fileno(),))
        except subprocess.TimeoutExpired:
            return {"error": f"the prompt registry did not answer within {timeout:g} seconds", "kind": "unavailable"}
    try:
        return json.loads(output.decode().strip().splitlines()[-1])
    except (IndexError, ValueError):
        words = f"asking the prompt registry failed with exit status {status}; the server's log says why"
        return {"error": words, "kind": "unavailable"}
