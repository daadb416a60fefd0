"""A warm standby: loaded beside the engine, without clients, and in its place when it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest
from processes import alive_after, gone
from transport_place import SETTINGS, Place, by_sequence, completion, eventually

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.transport import attach

STANDBY = msgspec.structs.replace(SETTINGS, standby=1)


def standing_by(engine: Any) -> bool:
    health = engine.health()
    return health.status == "ready" and health.num_standbys == 1


def processes_of(place: Place, engine: Any) -> tuple[psutil.Process, psutil.Process]:
    """Return the engine's pid and its standby's, once the latter is ready."""

    def found() -> dict[int, psutil.Process]:
        return {process.pid: process for process in place.engines() if not gone(process)}

    assert eventually(lambda: standing_by(engine) and len(found()) == 2)
    both = found()
    return both.pop(engine.info.pid), *both.values()


def test_a_standby_takes_over(place: Place, make_bundle: Callable[..., Bundle]) -> None:
    """A stream whose engine is killed continues in the standby with the same tokens; a new standby starts, and all end
    with the last client.
    """
    bundle = make_bundle(step_delay=0.01)
    with place.connect(bundle, STANDBY) as engine:
        expected = by_sequence(engine.submit(completion("whole", max_tokens=200)))
        for turn in range(2):
            serving, standby = processes_of(place, engine)
            stream = engine.submit(completion(f"cut {turn}", max_tokens=200))
            first = next(stream)
            serving.kill()
            assert by_sequence([first, *stream]) == expected
            assert engine.info.pid == standby.pid
        found = [*processes_of(place, engine)]
        assert engine.info.num_standbys == 1
    assert not alive_after(found)
    place.assert_clean()


def test_attached_clients_find_the_standby(place: Place, make_bundle: Callable[..., Bundle]) -> None:
    """A client that starts no engine continues in the standby, without its supervisor's help."""
    with place.connect(make_bundle(step_delay=0.01), STANDBY) as owner:
        serving, standby = processes_of(place, owner)
        (directory,) = [path for path in os.listdir(place.runtime) if os.path.isdir(os.path.join(place.runtime, path))]
        with attach(os.path.join(place.runtime, directory)) as client:
            stream = client.submit(completion(max_tokens=100))
            first = next(stream)
            serving.kill()
            tokens, _ = by_sequence([first, *stream])
            assert (len(tokens[0]), client.info.pid) == (100, standby.pid)


def test_a_hanging_engine_is_replaced_by_its_standby(place: Place, make_bundle: Callable[..., Bundle]) -> None:
    """A hanging engine is killed and its standby takes over."""
    settings = msgspec.structs.replace(STANDBY, stall_timeout=2.0)
    with place.connect(make_bundle(), settings, keep=True) as engine:
        serving, standby = processes_of(place, engine)
        serving.send_signal(signal.SIGSTOP)
        assert eventually(lambda: engine.info.pid == standby.pid and engine.health().status == "ready")
        assert not alive_after([serving])


def test_a_standby_that_dies_is_replaced(place: Place, make_bundle: Callable[..., Bundle]) -> None:
    """A standby that dies is replaced without any effect on the engine's users."""
    with place.connect(make_bundle(step_delay=0.01), STANDBY) as engine:
        serving, standby = processes_of(place, engine)
        stream = engine.submit(completion(max_tokens=100))
        standby.kill()
        tokens, _ = by_sequence(stream)
        assert len(tokens[0]) == 100
        assert not alive_after([standby])
        assert eventually(lambda: standing_by(engine) and len([p for p in place.engines() if not gone(p)]) == 2)
        assert processes_of(place, engine)[0] == serving


def test_all_killed_at_once(place: Place, make_bundle: Callable[..., Bundle]) -> None:
    """If engine and standby are killed together the engine is restarted as without one."""
    with place.connect(make_bundle(), STANDBY) as engine:
        both = processes_of(place, engine)
        for process in reversed(both):
            process.suspend()
        for process in both:
            process.kill()
        assert not alive_after(both)
        assert len(by_sequence(engine.submit(completion(max_tokens=5)))[0][0]) == 5
        assert engine.info.pid not in {process.pid for process in both}


def test_sigterm_of_an_engine_ends_its_standby(place: Place, make_bundle: Callable[..., Bundle]) -> None:
    """After a SIGTERM engine and standby end with their last client; SIGTERM of the standby alone keeps the engine's
    files.
    """
    engine = place.connect(make_bundle(), STANDBY)
    serving, standby = processes_of(place, engine)
    standby.terminate()
    assert not alive_after([standby])
    serving, again = processes_of(place, engine)
    assert again.pid != standby.pid
    serving.terminate()
    engine.close()
    assert not alive_after([serving, again])
    place.assert_clean()


def test_clients_that_die_with_the_engine(place: Place, make_bundle: Callable[..., Bundle]) -> None:
    """A standby that takes over without clients ends, and leaves no files."""
    child = place.run(
        """
        while engine.health().num_standbys != 1: time.sleep(0.02)
        print(engine.info.pid, flush=True); time.sleep(600)
        """,
        make_bundle(),
        STANDBY,
    )
    assert child.stdout is not None
    serving = psutil.Process(int(child.stdout.readline()))
    child.kill()
    serving.kill()
    place.assert_clean()


def test_invalid_numbers_of_standbys_are_refused() -> None:
    """More than one standby, or one for an engine without a process, is refused by name."""
    for settings in ({"standby": 2}, {"standby": 1, "in_process": True}):
        with pytest.raises(InvalidField, match="standby"):
            EngineSettings(**settings)
