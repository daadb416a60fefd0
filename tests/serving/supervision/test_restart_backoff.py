"""A replica whose engine cannot be started again for a while says so, and starts it once it can."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import gone
from transport_place import CORE, SETTINGS, eventually

from mlflow_llm.serving.interface.errors import EngineDied, NotFound, Unavailable
from mlflow_llm.serving.supervision import backoff_launcher, replica
from mlflow_llm.serving.supervision.backoff_launcher import BackoffLauncher
from mlflow_llm.serving.supervision.supervisor import EngineSpec, Supervisor
from mlflow_llm.serving.transport.discovery.launcher import Launcher


@pytest.fixture
def supervise(place):
    """Return ``supervise(bundle)``, which starts a supervisor that keeps the bundle as "a", ready."""
    made = []

    def make(bundle, **options):
        made.append(Supervisor(state_dir=place.runtime, **options))
        made[-1].add("a", EngineSpec(bundle=bundle, settings=SETTINGS, core=CORE))
        made[-1].await_ready("a")
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.close()
    place.assert_clean()


def one(supervisor):
    (found,) = supervisor.status("a").replicas
    return found


def engine_of(supervisor):
    """Return the replica's engine, None while it is not ready."""
    with contextlib.suppress(NotFound):
        return supervisor.engine("a")


def die(pid):
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: gone(pid))


def test_a_kept_engine_outlives_a_full_disk(place, make_bundle, supervise, full_disk):
    """On a full disk the replica reports the fault, and starts the engine once there is room."""
    supervisor = supervise(make_bundle())
    pid = supervisor.engine("a").info.pid
    full_disk(2)
    die(pid)
    assert eventually(lambda: one(supervisor).state == "failed")
    assert "No space left" in one(supervisor).message
    assert eventually(lambda: one(supervisor).state == "ready")
    assert (one(supervisor).message, one(supervisor).restarts) == ("", 1)


def test_a_client_that_ends_is_replaced(make_bundle, supervise):
    """A replica whose own connection to its engine has ended for good makes another."""
    supervisor = supervise(make_bundle())
    broken = supervisor.engine("a")
    broken.io.stop()
    assert eventually(lambda: broken.health().status == "dead")
    assert eventually(lambda: engine_of(supervisor) not in (None, broken))


def test_an_engine_that_loads_no_more_is_failed(make_bundle, supervise):
    """An engine that is killed and whose weights are gone is failed with the reason, and ready again when they are
    back.
    """
    bundle = make_bundle()
    supervisor = supervise(bundle)
    weights = Path(bundle.model_dir, "instant.json")
    text = weights.read_text()
    weights.unlink()
    die(supervisor.engine("a").info.pid)
    assert eventually(lambda: one(supervisor).state == "failed")
    assert "instant.json" in one(supervisor).message
    assert one(supervisor).was_ready
    assert one(supervisor).health.status == "dead"
    weights.write_text(text)
    assert eventually(lambda: one(supervisor).state == "ready")
    assert one(supervisor).message == ""


def test_a_draining_replica_stays_while_its_use_is_unknown(place, make_bundle, supervise):
    """A draining replica stays while the files that say whether it is in use cannot be read."""
    asked, unreadable = [], [OSError(errno.EMFILE, "Too many open files")]

    def in_use(address):
        asked.append(address)
        if unreadable:
            raise unreadable[0]
        return False

    supervisor = supervise(make_bundle(), in_use=in_use)
    supervisor.remove("a")
    assert eventually(lambda: len(asked) > 5)
    assert one(supervisor).state == "draining"
    unreadable.clear()
    assert eventually(lambda: not place.engines())


def test_pauses_start_over_after_a_healthy_life(make_bundle, supervise, monkeypatch):
    """A replica that has been refused often waits no longer than at first once its engine was well for a while."""
    pauses, refusals = [], [Unavailable("not yet")] * 3
    monkeypatch.setattr(replica, "HEALTHY_SECONDS", 0.0)
    monkeypatch.setattr(replica.Replica, "sleep", lambda self, seconds: pauses.append(seconds))

    def probe(engine):
        if refusals:
            raise refusals.pop()

    supervisor = supervise(make_bundle(), probe=probe)
    assert eventually(lambda: one(supervisor).state == "ready")
    supervisor.engine("a").io.stop()
    assert eventually(lambda: len(pauses) == 4)
    assert pauses == [0.25, 0.5, 1.0, 0.25]


def test_a_long_failed_load_does_not_reset_the_backoff(place, make_bundle, monkeypatch):
    """An engine that takes long to fail is not started again at once, each time."""
    now = [0.0]

    def pass_by(seconds):
        now[0] += seconds

    def find(self, stalled, cancelled):
        pass_by(10.0)
        raise EngineDied("killed while it loaded")

    monkeypatch.setattr(backoff_launcher, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pass_by))
    monkeypatch.setattr(Launcher, "find", find)
    launcher = BackoffLauncher(make_bundle(), SETTINGS, state_dir=place.runtime, core=CORE, over=lambda: False)
    waited = []
    for _ in range(5):
        began = now[0]
        with pytest.raises(EngineDied):
            launcher.find("", lambda: False)
        waited.append(now[0] - began - 10.0)
    assert waited == pytest.approx([0.0, 0.0, 0.25, 0.5, 1.0], abs=0.06)


def test_a_crashing_engine_is_not_started_as_fast_as_it_crashes(place, make_bundle, monkeypatch):
    """Pauses double from the second early death on and start over after a healthy life."""
    now = [0.0]

    def pass_by(seconds):
        now[0] += seconds

    monkeypatch.setattr(backoff_launcher, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pass_by))
    monkeypatch.setattr(Launcher, "find", lambda self, stalled, cancelled: "ipc://socket")
    launcher = BackoffLauncher(make_bundle(), SETTINGS, state_dir=place.runtime, core=CORE, over=lambda: False)
    waited = []
    for life in (0.1, 0.1, 0.1, 0.1, 10.0, 0.1, 0.1):
        began = now[0]
        launcher.find("", lambda: False)
        waited.append(now[0] - began)
        pass_by(life)
    assert waited == pytest.approx([0.0, 0.0, 0.25, 0.5, 1.0, 0.0, 0.0], abs=0.06)
