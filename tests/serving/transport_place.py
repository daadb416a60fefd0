"""Instant models, clients in other processes, and a look at what is left over."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Event, Finished, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantModel, write_model
from mlflow_llm.serving.transport.discovery.state_directory import StateDirectory

CORE = "mlflow_llm.serving.testing.instant_core:InstantCore"
SETTINGS = EngineSettings(idle_timeout=0.3, stall_timeout=60.0, start_timeout=240.0)
HASTY = msgspec.structs.replace(SETTINGS, stall_timeout=1.5)  # for engines that a test stops


CLIENT = """
import os, sys, time, threading, msgspec
from mlflow_llm.serving.transport import connect
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

bundle = msgspec.json.decode(sys.argv[1], type=Bundle)
settings = msgspec.json.decode(sys.argv[2], type=EngineSettings)
engine = connect(bundle, settings, state_dir=sys.argv[3], core=sys.argv[4])

def request(max_tokens, name="r"):
    sequence = Sequence(prompt_token_ids=(1, 2), seed=1)
    sampling = Sampling(max_tokens=max_tokens)
    return ValidRequest(request_id=name, task="completions", model="m", sequences=(sequence,), sampling=sampling)

"""


def eventually(condition: Callable[[], bool], timeout: float = 240) -> bool:
    deadline, pause = time.monotonic() + timeout, 0.01
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(pause)
        pause = min(pause * 1.3, 0.2)
    return condition()


class Place:
    """A runtime directory of the test's own (short: a socket's path has 107 bytes), and its processes."""

    def __init__(self) -> None:
        self.base = tempfile.mkdtemp(prefix="t", dir="/tmp")
        self.runtime = os.path.join(self.base, "r")
        self.children: list[subprocess.Popen[str]] = []

    def engines(self) -> list[psutil.Process]:
        """Return the engine processes of this place, zombies included."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if any(part.startswith(self.runtime) and part.endswith("spec.json") for part in line):
                found.append(process)
        return found

    def is_clean(self) -> bool:
        return not self.engines() and not os.path.exists(self.runtime)

    def assert_clean(self) -> None:
        assert eventually(self.is_clean), (self.engines(), [str(p) for p in Path(self.base).rglob("*")])

    def connect(self, bundle: Bundle, settings: EngineSettings = SETTINGS, **options: Any) -> Any:
        from mlflow_llm.serving.transport import connect

        return connect(bundle, settings, state_dir=self.runtime, core=CORE, **options)

    def run(self, code: str, bundle: Bundle, settings: EngineSettings = SETTINGS) -> subprocess.Popen[str]:
        """Start a Python process that runs ``CLIENT`` and then ``code``."""
        program = CLIENT + textwrap.dedent(code)
        arguments = [msgspec.json.encode(bundle), msgspec.json.encode(settings), self.runtime, CORE]
        child = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()
        for engine in self.engines():
            engine.kill()
        shutil.rmtree(self.base, ignore_errors=True)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Bundle]:
    def make(**model: Any) -> Bundle:
        return write_model(tmp_path / "model", InstantModel(**model))

    return make


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return ``full_disk(times)``, after which so many writes of state files fail."""
    left: list[OSError] = []
    real = StateDirectory.write_json

    def write_json(self: StateDirectory, name: str, value: object) -> None:
        if left:
            raise left.pop()
        real(self, name, value)

    monkeypatch.setattr(StateDirectory, "write_json", write_json)
    return lambda times: left.extend(OSError(errno.ENOSPC, "No space left on device") for _ in range(times))


def completion(
    name: str = "", *, max_tokens: int = 20, n: int = 1, temperature: float = 1.0, prompt: tuple[int, ...] = (1, 2, 3)
) -> ValidRequest:
    return ValidRequest(
        request_id=name or uuid.uuid4().hex,
        task="completions",
        model="m",
        n=n,
        cache_salt="tests",
        sequences=tuple(Sequence(prompt_token_ids=prompt, seed=7 + i) for i in range(n)),
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, stop_token_ids=(0,)),
    )


def timeless(events: Iterable[Event]) -> list[Event]:
    """Return ``events`` without their times."""
    return [msgspec.structs.replace(e, queue_time=0.0) if isinstance(e, Finished) else e for e in events]


def by_sequence(events: Iterable[Event]) -> tuple[dict[int, list[int]], dict[int | None, Event]]:
    """Return the token ids and the ending of each sequence."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int | None, Event] = {}
    for event in timeless(events):
        if isinstance(event, Tokens):
            tokens.setdefault(event.index, []).extend(event.token_ids)
        else:
            ends[getattr(event, "index", None)] = event
    return tokens, ends
