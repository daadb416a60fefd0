"""When a worker's follower takes a turn: it is not woken to find that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gevent
import pytest

from mlflow_llm.serving.control.plan import Plan, PlanDirectory
from mlflow_llm.serving.routing import plan_follower as module
from mlflow_llm.serving.routing.load_shedding import LoadShedder
from mlflow_llm.serving.routing.plan_follower import PlanFollower
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints


class Follower(PlanFollower):
    looks = turns = adopted = 0

    def _look(self, due: object) -> None:
        self.looks += 1
        super()._look(due)  # type: ignore[arg-type]

    def adopt(self) -> None:
        super().adopt()
        self.adopted += 1

    def _release_idle(self) -> None:
        self.turns += 1
        super()._release_idle()


def until(what: Callable[[], bool]) -> None:
    with gevent.Timeout(60):
        while not what():
            gevent.sleep(0.001)


def test_the_follower_is_woken_for_a_new_plan_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower polls without waking its greenlet until there is a new plan or an incomplete one."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.001)
    directory, shedder = PlanDirectory(tmp_path), LoadShedder(max_queued=1, retry_after=1.0)
    directory.publish(Plan(generation=1))
    follower = Follower(directory, ServedEndpoints(), shedder, open=None, ledger=None)
    follower.adopt()
    running = gevent.spawn(follower.run)

    def rests() -> bool:
        """Return whether many polls pass without a turn."""
        looks, turns = follower.looks, follower.turns
        until(lambda: follower.looks > looks + 20)
        return follower.turns == turns

    assert rests()
    directory.publish(Plan(generation=2))
    until(lambda: follower.generation == 2)
    until(rests)
    adopted = follower.adopted
    follower.complete = False  # a replica could not be reached
    until(lambda: follower.complete)
    until(rests)
    assert follower.adopted > adopted
    running.kill()
    follower.close()
