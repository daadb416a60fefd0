"""The choice of engines that stay loaded within a memory budget: idle ones are unloaded, least recently used first."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import pytest

from mlflow_llm.serving.control.engine_memory import (
    GIB,
    GRACE_SECONDS,
    EngineMemory,
    estimated_size,
    proportional_set_size,
)
from mlflow_llm.serving.endpoints.config import EntityConfig, ModelSource
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import EngineInfo, Health
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.supervision.supervisor import EngineStatus, ReplicaStatus

INFO = EngineInfo(content_hash="x", tasks=("chat",), vocab_size=1, max_model_len=1, max_num_seqs=1, max_kv_tokens=1)


class Machine:
    """Engines that start and end as told, on a clock of the test's own. ``sizes`` in GiB are their memory."""

    def __init__(self, tmp_path: Path, budget: float | None, sizes: dict[str, float]) -> None:
        self.now = 1000.0
        self.sizes = dict(sizes)
        self.running = dict.fromkeys(sizes, 0)
        self.leaving: set[str] = set()
        self.held: set[str] = set()  # engines still in use by a worker, which do not end
        self.busy: set[str] = set()
        self.requested: dict[str, float] = {}
        self.steps = dict.fromkeys(sizes, 0)
        self.place = tmp_path
        self.admitted: list[str] = []
        self.memory = EngineMemory(None if budget is None else int(budget * GIB), measure=self._measured)

    def _measured(self, pid: int) -> int:
        return int(list(self.sizes.values())[pid - 1] * GIB)

    def entity(self, key: str, **fields: int) -> EntityConfig:
        directory = self.place / key
        directory.mkdir(exist_ok=True)
        with open(directory / "model.safetensors", "wb") as file:
            file.truncate(int(self.sizes[key] * GIB))  # sparse
        bundle = Bundle(content_hash=key, tasks=("chat",), model_dir=str(directory), tokenizer_dir="")
        source = ModelSource(uri=key, bundle=bundle)
        return EntityConfig(name=key, entity_name=key, entity_version="", source=source, **fields)

    def admit(self, *keys: str, **fields: int) -> None:
        for key in keys:
            self.memory.admit(key, self.entity(key, **fields), "e")
            self.admitted.append(key)

    def status(self, key: str) -> EngineStatus:
        number = max(self.running[key], int(key in self.leaving | self.held))
        health = Health(status="ready", num_running=int(key in self.busy), steps=self.steps[key])
        replica = ReplicaStatus(index=0, address=key, state="ready", health=health, pid=list(self.sizes).index(key) + 1)
        return EngineStatus(
            entity=key, wanted=self.running[key], replicas=(replica,) * number, info=INFO, start_seconds=7.0
        )

    def tick(self, wanted: dict[str, int] | None = None, *, seconds: float = GRACE_SECONDS) -> set[str]:
        """Advance the clock by ``seconds``, apply the budget and return the keys of the loaded engines."""
        self.now += seconds
        wanted = dict.fromkeys(self.admitted, 1) | (wanted or {})
        status = {key: self.status(key) for key in wanted}
        for key in wanted:
            self.memory.look(key, status[key], self.requested.get(key), self.now)
        self.leaving.clear()
        for key, number in self.memory.fit(wanted, status, self.now).items():
            if self.running[key] and not number:
                self.leaving.add(key)
            self.running[key] = number
        return {key for key, number in self.running.items() if number}

    def request(self, key: str) -> set[str]:
        """Request an engine and return the keys of the engines loaded once the request was served."""
        for _ in range(4):
            self.requested[key] = self.now
            self.tick(seconds=0.5)
        self.steps[key] += 1
        return self.tick(seconds=0.5)

    def start(self, *keys: str) -> None:
        """Load the engines one after the other, as rollouts do."""
        for key in keys:
            self.admit(key)
            for _ in range(3):
                self.tick()
            self.memory.warmed(key)
            self.steps[key] += 1


def test_idle_engines_go_the_least_recently_used_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The least recently used engine is unloaded for the requested one, and the log gives its name, the reason and the
    reload time.
    """
    machine = Machine(tmp_path, 2.5, {"a": 1, "b": 1, "c": 1})
    machine.admit("a", "b", "c")
    for key in "abc":
        machine.memory.warmed(key)
    assert machine.tick({"c": 0}) == {"a", "b"}
    machine.steps["a"] += 1
    machine.tick({"c": 0}, seconds=0.1)
    machine.tick({"c": 0})
    with caplog.at_level(logging.WARNING):
        assert machine.request("c") == {"a", "c"}
    assert "unloaded e/b (1.00 GiB): its 1.00 GiB were needed for e/c; a request brings it back in about 7.0 s" in str(
        caplog.messages
    )
    machine.tick(seconds=2 * GRACE_SECONDS)
    assert machine.request("b") == {"b", "c"}
    record = machine.memory.records()["a"]
    assert (record.unloaded, record.unloads) == ("its 1.00 GiB were needed for e/b", 1)
    assert machine.memory.records()["b"].unloaded == ""


def test_one_that_is_unloaded_stays_so_until_it_is_asked_for(tmp_path: Path) -> None:
    """Only a request brings an unloaded engine back, however much memory is free."""
    machine = Machine(tmp_path, 1.5, {"a": 1, "b": 1})
    machine.start("a", "b")
    assert machine.tick() == {"b"}
    machine.sizes["b"] = 0.1
    for _ in range(5):
        assert machine.tick() == {"b"}
    assert machine.request("a") == {"a", "b"}


def test_the_new_one_starts_when_the_old_one_is_gone(tmp_path: Path) -> None:
    """An engine that is unloaded finishes its requests, and its memory counts until its process has ended."""
    machine = Machine(tmp_path, 1.5, {"a": 1, "b": 1})
    machine.start("a", "b")
    for _ in range(3):
        machine.tick()
    machine.requested["a"] = machine.now + 1.0
    assert machine.tick(seconds=1.0) == set()  # b ends
    assert machine.tick(seconds=0.1) == set()  # and is still there
    assert machine.tick(seconds=0.1) == {"a"}


def test_one_that_is_asked_for_while_it_leaves_comes_back(tmp_path: Path) -> None:
    """An engine requested while it shuts down comes back: its process exists and needs no further memory."""
    machine = Machine(tmp_path, 1.5, {"a": 1, "b": 1})
    machine.start("a", "b")
    for _ in range(3):
        machine.tick()
    machine.held.add("b")
    assert machine.request("a") == set()  # which has no room before b has ended
    machine.tick(seconds=GRACE_SECONDS)
    machine.requested["b"] = machine.now
    assert machine.tick(seconds=0.1) == {"b"}
    machine.held.clear()
    machine.tick(seconds=GRACE_SECONDS)
    assert machine.request("a") == {"a"}


def test_one_that_scaled_to_zero_comes_back_while_it_leaves(tmp_path: Path) -> None:
    """An engine that scales to zero comes back on a request even while it is still shutting down."""
    machine = Machine(tmp_path, 1.5, {"a": 1})
    machine.start("a")
    machine.held.add("a")
    assert machine.tick({"a": 0}) == set()
    machine.requested["a"] = machine.now
    assert machine.tick(seconds=0.1) == {"a"}


def test_busy_engines_and_those_just_asked_for_stay(tmp_path: Path) -> None:
    """A busy engine is not unloaded, nor one that was just reloaded for a request: the other one waits."""
    machine = Machine(tmp_path, 1.5, {"a": 1, "b": 1})
    machine.start("a", "b")
    machine.busy.add("b")
    assert machine.request("a") == {"b"}
    machine.busy.clear()
    assert machine.request("a") == {"b"}  # within the grace
    machine.tick(seconds=GRACE_SECONDS)
    assert machine.request("a") == {"a"}


def test_a_provisioned_minimum_is_never_unloaded(tmp_path: Path) -> None:
    """An engine with a provisioned minimum stays loaded even when idle; the others share the rest of the budget."""
    machine = Machine(tmp_path, 2.5, {"paid": 1, "a": 1, "b": 1})
    machine.admit("paid", min_provisioned_throughput=5, max_provisioned_throughput=5)
    machine.admit("a", "b")
    for key in ("paid", "a", "b"):
        machine.memory.warmed(key)
    machine.tick({"b": 0})
    machine.steps["a"] += 1
    machine.tick({"b": 0}, seconds=100)
    machine.tick({"b": 0}, seconds=100)
    assert machine.request("b") == {"paid", "b"}


def test_an_engine_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    """An engine larger than the budget, by its files, by measurement or beside pinned ones, is refused by name."""
    machine = Machine(tmp_path, 2, {"huge": 3, "a": 1.5, "b": 1.5})
    with pytest.raises(
        PackagingError, match=r"entity e/huge has files of 3.00 GiB, more than engine_memory_budget has"
    ):
        machine.admit("huge")
    machine.admit("a", min_provisioned_throughput=1, max_provisioned_throughput=1)
    with pytest.raises(PackagingError, match=r"e/b .* never unloaded .* leave 0.50 GiB of engine_memory_budget"):
        machine.admit("b", min_provisioned_throughput=1, max_provisioned_throughput=1)
    machine.sizes["a"] = 2.5
    machine.memory.look("a", EngineStatus(entity="a", wanted=1, replicas=machine.status("a").replicas), None, 0.0)
    machine.running["a"] = 1
    machine.memory.look("a", machine.status("a"), None, machine.now)
    with pytest.raises(PackagingError, match=r"e/a takes 2.50 GiB"):
        machine.memory.check("a")


def test_growth_beyond_the_budget_unloads_what_is_idle(tmp_path: Path) -> None:
    """If an engine grows beyond the estimate, the least recently used idle engine is unloaded."""
    machine = Machine(tmp_path, 2.5, {"a": 1, "b": 1})
    machine.start("a", "b")
    assert machine.tick() == {"a", "b"}
    machine.sizes["b"] = 2
    machine.busy.add("b")
    machine.tick(seconds=10)
    assert machine.tick(seconds=10) == {"b"}


def test_without_a_budget_nothing_is_unloaded(tmp_path: Path) -> None:
    """Without a memory budget every wanted engine stays loaded; one scaled to zero records the reason."""
    machine = Machine(tmp_path, None, {"a": 100, "b": 100})
    machine.admit("a", "b")
    assert machine.tick() == {"a", "b"}
    assert machine.tick({"a": 0}) == {"b"}
    assert machine.memory.records()["a"].unloaded == "no request came for it"
    assert machine.request("a") == {"a", "b"}


def test_a_new_controller_process_keeps_what_is_loaded(tmp_path: Path) -> None:
    """A new controller process knows each engine's size and load time, and prefers engines that are running."""
    before = Machine(tmp_path, 1.5, {"a": 1, "b": 1})
    before.start("a", "b")
    assert before.tick() == {"b"}
    after = Machine(tmp_path, 1.5, {"a": 1, "b": 1})
    after.memory = EngineMemory(int(1.5 * GIB), known=before.memory.records())
    after.sizes = {"a": 0.0, "b": 0.0}  # the files give no estimate
    after.admit("a", "b")
    record = after.memory.records()["a"]
    assert (record.memory, record.start_seconds, record.unloads) == (GIB, 7.0, 1)
    assert after.tick() == {"b"}


def test_sizes_are_of_files_then_of_processes(tmp_path: Path) -> None:
    """An engine's size is estimated from its weights and KV cache, and measured once its process runs."""
    machine = Machine(tmp_path, None, {"a": 1})
    source = machine.entity("a").model
    assert estimated_size(source) == GIB
    more = ModelSource(uri="a", bundle=source.bundle, engine=EngineSettings(kv_cache_memory=GIB))
    assert estimated_size(more) == 2 * GIB
    before = proportional_set_size(os.getpid())
    with mmap.mmap(-1, 64 << 20) as ballast:  # pages of its own, not those that something else has given back
        ballast.write(b"\xff" * len(ballast))
        assert proportional_set_size(os.getpid()) > before + len(ballast) // 2
    assert proportional_set_size(2**22 + 1) == 0
