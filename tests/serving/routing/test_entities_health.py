"""``/health``: which states of which engines make a 503, and what it says of each."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest

from mlflow_llm.serving.http.inference import info_routes
from mlflow_llm.serving.interface.engine import EngineInfo, EngineRecord, Health, PagedInfo
from mlflow_llm.serving.metering.accounts.authorization import ANONYMOUS
from mlflow_llm.serving.routing.replica_set import ReplicaSet
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoint, ServedEndpoints, ServedEntity

NATIVE = EngineInfo(
    content_hash="", tasks=("chat",), vocab_size=9, max_model_len=9, max_num_seqs=1, max_kv_tokens=9, kernels="native"
)


def engine(status: str, **figures: float) -> SimpleNamespace:
    return SimpleNamespace(
        health=lambda: Health(status=status, **figures), close=lambda: None, info=NATIVE, record=EngineRecord
    )


def health_of(**endpoints: dict[str, object]) -> tuple[int, dict]:
    """Return status and endpoints of the health answer for these engines by served entity."""
    served = ServedEndpoints()
    served.replace(
        tuple(
            ServedEndpoint(
                name=name,
                entities={
                    e: ServedEntity(endpoint=name, entity=e, view=None, engine=found) for e, found in engines.items()
                },
            )
            for name, engines in endpoints.items()
        )
    )
    answer = info_routes.health(SimpleNamespace(endpoints=served), SimpleNamespace(caller=ANONYMOUS))
    return answer.status, json.loads(answer.body)["endpoints"]


def replicas(*engines: object) -> ReplicaSet:
    each = dict(zip(map(str, range(len(engines))), engines, strict=True))
    found = ReplicaSet(NATIVE, (), open=each.__getitem__, request_replica=lambda: None)
    found.set_addresses(tuple(each))
    return found


@pytest.mark.parametrize("status", ["draining", "stalled", "starting", "dead"])
def test_every_served_entity_counts(status: str) -> None:
    """A second entity that makes no progress is a 503; the endpoint's state is its worst entity's."""
    well = {"only": engine("ready")}
    code, found = health_of(
        chat={"v1": engine("ready", num_running=1), "v2": engine(status, num_running=2)}, other=well
    )
    assert code == 503
    assert (found["chat"]["status"], found["chat"]["running"]) == (status, 3)
    assert {name: (e["status"], e["running"]) for name, e in found["chat"]["entities"].items()} == {
        "v1": ("ready", 1),
        "v2": (status, 2),
    }
    idle = {"status": "ready", "steps": 0, "last_step_age": 0.0, "running": 0, "waiting": 0, "cpu_wait": 0.0}
    assert found["other"] == {**idle, "processor_wait": 0.0, "kernels": "native"}
    assert health_of(chat={"v1": engine("ready"), "v2": engine("ready")}, other=well)[0] == 200


def test_one_replica_that_makes_progress_is_enough() -> None:
    """One progressing replica makes an entity healthy; no wanted replica is healthy too, but none reachable is not."""
    hung, good = engine("stalled", last_step_age=9.0, steps=1), engine("ready", last_step_age=0.1, steps=1)
    code, found = health_of(chat={"v1": replicas(hung, good)})
    assert (code, found["chat"]["status"], found["chat"]["last_step_age"]) == (200, "ready", 9.0)
    assert health_of(chat={"v1": replicas(hung, hung)})[0] == 503
    assert health_of(chat={"v1": replicas()})[0] == 200
    idle = [engine("ready", last_step_age=age) for age in (50.0, 2.0)]
    assert replicas(*idle).health().last_step_age == 2.0
    waiting = [engine("ready", cpu_wait=share) for share in (0.1, 0.4, 0.2)]
    assert replicas(*waiting).health().cpu_wait == 0.4


def test_health_names_the_engines_kernels() -> None:
    """Health names the kernels of each endpoint's or entity's engine, with the reason if they are torch's."""
    slow = engine("ready")
    slow.info = msgspec.structs.replace(NATIVE, kernels="torch", kernels_reason="they are not compiled")
    reported_of = {"kernels": "torch", "kernels_reason": "they are not compiled"}
    found = health_of(one={"v1": slow}, two={"v1": engine("ready"), "v2": slow})[1]
    assert found["one"].items() >= reported_of.items()
    assert found["two"]["entities"]["v2"].items() >= reported_of.items()
    assert (found["two"]["entities"]["v1"]["kernels"], "kernels" in found["two"]) == ("native", False)
    assert "kv_cache_reason" not in found["one"]
    kept = {"kv_cache_dtype": "int8", "kv_cache_reason": "whole keys and values"}
    slow.info = msgspec.structs.replace(NATIVE, **kept)
    assert health_of(one={"v1": slow})[1]["one"].items() >= kept.items()
    assert slow.info.kv_cache_summary == "int8 (whole keys and values)"
    slow.info = msgspec.structs.replace(NATIVE, max_num_batched_tokens=576)
    found = health_of(one={"v1": slow}, two={"v1": engine("ready")})[1]
    assert (found["one"]["max_num_batched_tokens"], "max_num_batched_tokens" in found["two"]) == (576, False)
    slow.info = msgspec.structs.replace(NATIVE, quantization="int8")
    found = health_of(one={"v1": slow}, two={"v1": engine("ready")})[1]
    assert (found["one"]["quantization"], "quantization" in found["two"]) == ("int8", False)


def test_health_counts_standbys_where_they_are_configured() -> None:
    """Health has the number of ready standbys where they are configured; they are no replicas, and a missing one is no
    503.
    """
    asked = [engine("ready", num_standbys=number) for number in (0, 1)]
    for one in asked:
        one.info = msgspec.structs.replace(NATIVE, num_standbys=1)
    code, found = health_of(lacking={"v1": asked[0]}, backed={"v1": asked[1]}, plain={"v1": engine("ready")})
    assert (code, found["lacking"]["standbys"], found["backed"]["standbys"]) == (200, 0, 1)
    assert "standbys" not in found["plain"]


def test_health_says_how_blocks_run() -> None:
    """Health describes a paged KV cache (block size, attention kernel, CUDA graphs) and has no such entry for slots."""
    on_gpu = engine("ready")
    paged = PagedInfo(kv_block_size=16, attention="triton", cuda_graphs=(1, 2))
    on_gpu.info = msgspec.structs.replace(NATIVE, paged=paged)
    found = health_of(one={"v1": on_gpu}, two={"v1": engine("ready")})[1]
    assert msgspec.convert(found["one"]["paged"], PagedInfo) == paged
    assert "paged" not in found["two"]
