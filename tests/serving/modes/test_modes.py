from __future__ import annotations

import threading

import msgspec
import pytest

from mlflow_llm.serving.interface.engine import EngineInfo
from mlflow_llm.serving.interface.errors import InvalidField, LimitExceeded, Overloaded
from mlflow_llm.serving.interface.events import Failed, Finished, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.metering import Caller, Ledger, Limits, Price, Store, Usage, UsageFilter
from mlflow_llm.serving.modes import PayPerToken, Provisioned, Target
from mlflow_llm.serving.modes.calibration import Capacity, calibrate
from mlflow_llm.serving.modes.provisioned import check_throughput

CALLER = Caller(key_id="key_1", tenant="acme")
TARGET = Target(endpoint="chat", entity="model-1")


@pytest.fixture
def store(tmp_path):
    opened = Store(f"sqlite:///{tmp_path}/metering.db")
    yield opened
    opened.close()


@pytest.fixture
def ledger(store, tmp_path):
    opened = Ledger(store, state_dir=tmp_path / "state", clock=lambda: 1_800_000_000.0, monotonic=lambda: 0.0)
    yield opened
    opened.close()


def valid(request_id: str, *, n: int = 1, prompts: int = 1, max_tokens: int = 20) -> ValidRequest:
    sequences = tuple(
        Sequence(prompt_token_ids=(1,) * (5 + prompt), seed=choice) for prompt in range(prompts) for choice in range(n)
    )
    return ValidRequest(
        request_id=request_id,
        task="completions",
        model="chat",
        sequences=sequences,
        n=n,
        sampling=Sampling(max_tokens=max_tokens),
        adapter="poet",
    )


def test_fields_follow_the_mode(ledger):
    """n belongs to provisioned throughput, error_behavior to pay-per-token; ``prepare`` refuses the others."""
    paid, reserved = PayPerToken(ledger).profile, Provisioned(ledger, throughput=10).profile
    assert (paid.accepts_n, paid.accepts_error_behavior) == (False, True)
    assert (reserved.accepts_n, reserved.accepts_error_behavior) == (True, False)


@pytest.mark.parametrize("mode", ["paid", "reserved"])
def test_a_request_reserves_what_it_may_use_at_most(store, ledger, mode):
    """A request reserves each prompt once and max_tokens for every sequence, and its row gets the counted tokens."""
    chosen = PayPerToken(ledger) if mode == "paid" else Provisioned(ledger, throughput=1000)
    Limits(store).set("key", "key_1", "otpm", 120)
    Limits(store).set("key", "key_1", "itpm", 11)
    with chosen.admit(valid("r1", n=3, prompts=2), CALLER, TARGET) as admitted:
        assert {limit.kind: limit.remaining for limit in admitted.lease.limits} == {"otpm": 0, "itpm": 0}
        with pytest.raises(LimitExceeded):
            chosen.admit(valid("r2"), CALLER, TARGET)
        admitted.lease.count(4, cached=2)
    (row,) = Usage(store).page(UsageFilter()).rows
    assert (row.mode, row.adapter, row.entity) == (chosen.profile.name, "poet", "model-1")
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (11, 2, 4)


def test_within_the_reserve_a_request_runs_first(ledger):
    """A request within the reserve has priority in the engine; one beyond it competes like pay-per-token requests."""
    reserved, paid = Provisioned(ledger, throughput=1), PayPerToken(ledger)
    admissions = [reserved.admit(valid(f"r{number}"), CALLER, TARGET) for number in range(3)]  # 25 of 60 tokens each
    flood = paid.admit(valid("flood"), CALLER, TARGET)
    assert [admitted.request.provisioned for admitted in admissions] == [True, True, False]
    assert not flood.request.provisioned
    for admitted in (*admissions, flood):
        admitted.lease.settle()


def test_a_throughput_that_cannot_be_given_is_refused(ledger):
    """Invalid ranges are refused at once, and a minimum over the capacity once that is measured."""
    capacity = Capacity(decode_tokens_per_second=100, prefill_tokens_per_second=1000)
    check_throughput(0, 100)
    check_throughput(200, 300, capacity, max_replicas=2)
    with pytest.raises(InvalidField, match="measured"):
        check_throughput(201, 300, capacity, max_replicas=2)
    for minimum, maximum in ((-1, 5), (5, 4), (0, 0), (0, None)):
        with pytest.raises(InvalidField):
            check_throughput(minimum, maximum)
    with pytest.raises(InvalidField):
        Provisioned(ledger, throughput=0)
    assert capacity.prompt_weight_milli == 100


class TimedEngine:
    """An engine whose clock advances 1 ms a prompt token and 10 ms a generated one, so that its speed is known."""

    def __init__(self, failure: Failed | None = None) -> None:
        self.now, self.scale = 0.0, 1
        self.info = EngineInfo(
            content_hash="x", tasks=("chat",), vocab_size=50, max_model_len=128, max_num_seqs=4, max_kv_tokens=512
        )
        self._failure = failure
        self._lock = threading.Lock()
        self.prompts: list[tuple[int, ...]] = []

    def clock(self) -> float:
        return self.now

    def submit(self, request: ValidRequest):
        if self._failure is not None:
            yield self._failure
            return
        (sequence,) = request.sequences
        with self._lock:
            self.prompts.append(sequence.prompt_token_ids)
            seconds = 0.001 * len(sequence.prompt_token_ids) + 0.01 * (request.sampling.max_tokens - 1)
            self.now += self.scale * seconds
        for token in range(request.sampling.max_tokens):
            yield Tokens(0, (token,))
        yield Finished(0, "length")


def test_calibration_measures_reading_and_writing_apart():
    """Calibration separates 1 ms a prompt token from 10 ms a generated one, using different prompts."""
    engine = TimedEngine()
    capacity = calibrate(engine, prompt_tokens=40, new_tokens=20, clock=engine.clock)
    assert capacity.decode_tokens_per_second in (99, 100)
    assert capacity.prefill_tokens_per_second in (999, 1000)
    assert len(set(engine.prompts)) > 1
    assert all(0 <= token < 50 for prompt in engine.prompts for token in prompt)


def test_calibration_of_a_slow_engine_is_short():
    """Calibration of an engine that takes a second a token asks for few tokens and still measures the speed."""
    engine = TimedEngine()
    engine.scale = 100
    capacity = calibrate(engine, prompt_tokens=64, new_tokens=32, clock=engine.clock)
    assert capacity.decode_tokens_per_second == 1
    assert capacity.prefill_tokens_per_second in (9, 10)
    assert max(map(len, engine.prompts[2:])) == 8


def test_calibration_passes_the_engines_error_on():
    """An engine that refuses is not measured as slow."""
    with pytest.raises(Overloaded, match="full"):
        calibrate(TimedEngine(Failed("overloaded", "the queue is full")))


@pytest.mark.parametrize(("mode", "cost"), [("paid", 105), ("reserved", 0)])
def test_a_request_of_a_batch_has_its_own_mode_and_price(store, ledger, mode, cost):
    """It is billed at the price of batches where tokens are billed at all, and takes nothing from a reserve."""
    ledger.prices.set("*", Price(input=9_000_000, output=9_000_000), effective=1_800_000_000)
    ledger.prices.set("batch:*", Price(input=1_000_000, output=10_000_000), effective=1_800_000_000)
    chosen = PayPerToken(ledger) if mode == "paid" else Provisioned(ledger, throughput=1000)
    asked = msgspec.structs.replace(valid("one"), background=True)
    with chosen.admit(asked, CALLER, TARGET) as admission:
        assert not admission.request.provisioned
        admission.lease.settle(prompt=5, completion=10, finish_reason="stop")
    (row,) = Usage(store).rows(UsageFilter())
    assert (row.mode, row.cost) == ("batch", cost)
