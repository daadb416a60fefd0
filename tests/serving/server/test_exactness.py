"""The ledger under fire: mixed requests while workers and engines are killed and the store fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import psutil
import pytest
import sqlalchemy as sa
from counting_core import CORE, Truth, importable
from instant_model import write_instant_model
from mixed_load import Load, Record
from serving_process import Running, running

from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Keys, Limits, Price, Prices, Store, Usage, UsageFilter, UsageRow
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.accounts.money import cost
from mlflow_llm.serving.metering.proof.chain import extend
from mlflow_llm.serving.metering.proof.chain_check import check
from mlflow_llm.serving.metering.store.tables import ledger

pytestmark = pytest.mark.timeout(1800)  # the load is the same on a machine that has other things to do

REQUESTS = max(5000, int(os.environ.get("MLFLOW_LLM_EXACTNESS_REQUESTS", "0")))
SEED = int(os.environ.get("MLFLOW_LLM_EXACTNESS_SEED", "0")) or random.randrange(1, 10**6)
DATABASE = os.environ.get(
    "MLFLOW_LLM_EXACTNESS_DATABASE"
)  # an empty database, e.g. in PostgreSQL; by default a new SQLite file
CLIENTS, WORKERS = 16, 3
PRICE = Price(input=3_000_000, cached=300_000, output=15_000_000)
TIGHT = {  # tenant: (kind, limit), each small enough to refuse some of what its tenant asks for
    "itpm": 500,
    "otpm": 400,
    "qph": 100,
    "in_flight": 1,
    "budget": 30_000,
}
REFUSED = {"bad field": 400, "n": 400, "bad key": 401, "too long": 400}


class Chaos:
    """Faults while the load runs: killed workers and engines, and a locked store."""

    def __init__(self, server: Running, store: Store, seed: int) -> None:
        self._server, self._store, self._draw = server, store, random.Random(seed)
        self.killed_engines: set[int] = set()
        self.deeds: Counter[str] = Counter()

    def run(self, load: Load) -> None:
        deeds = [self.kill_worker, self.kill_engine, self.lock_store, self.kill_worker, self.kill_engine]
        for deed in itertools.cycle(deeds):
            # by what was done, not by the clock: a slow machine gets through as a fast one does
            reached = len(load.records) + self._draw.randrange(REQUESTS // 20, REQUESTS // 13)
            while load.running and len(load.records) < reached:
                time.sleep(0.02)
            if not load.running:
                return
            deed()

    def kill_worker(self) -> None:
        children = psutil.Process(self._server.process.pid).children()
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            workers = [child for child in children if not any("control.main" in word for word in child.cmdline())]
            self._draw.choice(workers).kill()
            self.deeds["worker killed"] += 1

    def kill_engine(self) -> None:
        for path in self._server.runtime.glob("*/status.json"):
            with contextlib.suppress(OSError, ValueError):
                status = json.loads(path.read_text())
                if status["state"] == "ready" and status["pid"] not in self.killed_engines:
                    os.kill(status["pid"], signal.SIGKILL)
                    self.killed_engines.add(status["pid"])
                    self.deeds["engine killed"] += 1

    def lock_store(self) -> None:
        """Lock the store for some seconds, longer than an admission waits."""

        def hold(connection: sa.Connection) -> None:
            self._store.lock_ledger(connection)
            time.sleep(self._draw.uniform(2.5, 4.0))

        self._store.write(hold, timeout=30)
        self.deeds["store away"] += 1


class Outcome:
    def __init__(self, records: list[Record], rows: dict[str, UsageRow], truth: Truth, chaos: Chaos, store: Store):
        self.records, self.rows, self.truth, self.chaos, self.store = records, rows, truth, chaos, store
        self.rows_of: dict[int, list[UsageRow]] = defaultdict(list)
        for request_id, serial in truth.serials.items():
            if request_id in rows:
                self.rows_of[serial].append(rows[request_id])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """Return everything that clients, engines and ledger report of one such load."""
    root = tmp_path_factory.mktemp("exact")
    database = DATABASE or f"sqlite:///{root}/ledger.db"
    store = Store(database)
    bundle = write_instant_model(root, step_delay=0.002)
    secrets = _tenants(store)
    tight = list(TIGHT)

    def tenant_of(draw: random.Random) -> tuple[str, str]:
        tenant = "open" if draw.random() < 0.75 else draw.choice(tight)
        return tenant, secrets[tenant]

    print(f"seed {SEED}")
    settings = {"workers": WORKERS, "database": database, "require_keys": True}
    with importable():
        engine = EngineSettings(idle_timeout=0.3, max_model_len=4096)
        reserved = EndpointSpec(
            name="reserved",
            entity="model-2",
            bundle=bundle,
            engine=engine,
            core=CORE,
            min_provisioned_throughput=100,
            max_provisioned_throughput=100,
        )
        state = str(root / "state")
        with running(bundle, core=CORE, engine=engine, more=(reserved,), state_dir=state, **settings) as server:
            load = Load(server.port, REQUESTS, CLIENTS, tenant_of, SEED)
            chaos = Chaos(server, store, SEED)
            load.start()
            chaos.run(load)
            load.join()
            truth = _await_settled(store, bundle.model_dir, chaos)
    print(dict(chaos.deeds), Counter((record.status, record.complete) for record in load.records))
    yield Outcome(load.records, _rows(store), truth, chaos, store)
    store.close()


def _tenants(store: Store) -> dict[str, str]:
    """Make a key for each tenant, prices, and one tight limit for each tenant but the first."""
    limits, keys = Limits(store), Keys(store)
    Prices(store).set("*", PRICE)
    secrets = {}
    for tenant in ("open", *TIGHT):
        secrets[tenant], key = keys.create(tenant)
        for scope, subject in (("tenant", tenant), ("key", key.key_id), ("endpoint", "assistant")):
            limits.set(scope, subject, "otpm", 10**9)
            limits.set(scope, subject, "in_flight", 10**6)
    for kind, value in TIGHT.items():
        limits.set("tenant", kind, kind, value)
    return secrets


def _rows(store: Store) -> dict[str, UsageRow]:
    return {row.request_id: row for row in Usage(store).rows(UsageFilter())}


def _await_settled(store: Store, model_dir: str, chaos: Chaos) -> Truth:
    """Wait until no row is open and the engines' counts have arrived."""
    until = time.monotonic() + 300
    while True:
        truth, rows = Truth(model_dir, chaos.killed_engines), _rows(store)
        settled = all(row.status != "open" and row.generated_tokens >= row.completion_tokens for row in rows.values())
        counted = all(truth.certain[name] <= row.generated_tokens for name, row in rows.items())
        if (settled and counted) or time.monotonic() > until:
            return truth
        time.sleep(0.5)


def test_the_load_was_what_it_should_be(outcome: Outcome) -> None:
    """The load had 5,000 requests, failing workers, engines and stores, refusals by every limit, and mostly served
    requests.
    """
    assert len(outcome.records) == REQUESTS
    deeds = outcome.chaos.deeds
    assert deeds["worker killed"] >= 3
    assert deeds["engine killed"] >= 3
    assert deeds["store away"] >= 2
    # a budget that is spent for ever is a 403; scopes are refused with one, too
    limited = [r.refused["error"]["message"] for r in outcome.records if r.status in (403, 429) and r.refused]
    assert {message.partition(":")[0] for message in limited if "'s limit is" in message} == set(TIGHT)
    assert sum(record.complete for record in outcome.records) > REQUESTS * 0.4
    assert {row.status for row in outcome.rows.values()} == {"ok", "aborted", "error", "recovered"}
    assert {row.mode for row in outcome.rows.values()} == {"pay_per_token", "provisioned"}


def test_one_row_a_request(outcome: Outcome) -> None:
    """Each request that ran has exactly one row, and a refused one has none."""
    assert set(outcome.truth.serials) <= set(outcome.rows)
    assert {serial: len(rows) for serial, rows in outcome.rows_of.items() if len(rows) > 1} == {}
    ids = Counter(name for record in outcome.records for name in record.ids)
    assert {name: count for name, count in ids.items() if count > 1} == {}
    for record in outcome.records:
        rows = outcome.rows_of[record.serial]
        if record.kind in REFUSED and record.status is not None and record.status < 500:
            assert record.status == REFUSED[record.kind], record
        if record.status is not None and 400 <= record.status < 499:
            assert rows == [], record
        if record.kind != "embed" and (record.ids or record.complete):
            assert [row.request_id for row in rows] == list(record.ids), record
            assert rows[0].tenant == record.tenant


def test_tokens_are_those_received_and_those_generated(outcome: Outcome) -> None:
    """Billed tokens plus undelivered ones are what the engines generated; none that a client has is missing."""
    rows, truth = outcome.rows, outcome.truth
    for name, row in rows.items():
        minimum = truth.certain[name]
        assert minimum <= row.generated_tokens <= minimum + truth.doubtful[name], row
        if row.task != "embeddings":
            assert row.completion_tokens <= row.generated_tokens, row
        if name not in truth.serials and row.task != "embeddings":
            assert row.completion_tokens == row.generated_tokens == 0, row
    for record in outcome.records:
        billed = sum(row.completion_tokens for row in outcome.rows_of[record.serial])
        assert record.received <= billed, record
        if record.complete and record.kind in ("stream", "whole", "batch", "choices", "stop"):
            (row,) = outcome.rows_of[record.serial]
            assert record.usage is not None
            reported = (record.usage["prompt_tokens"], record.usage["completion_tokens"])
            assert (row.status, (row.prompt_tokens, row.completion_tokens)) == ("ok", reported), record
            if record.kind in ("stream", "batch", "choices"):
                assert record.received == row.completion_tokens, record
    received = sum(record.received for record in outcome.records)
    billed = sum(row.completion_tokens for row in rows.values())
    generated = sum(row.generated_tokens for row in rows.values())
    assert received <= billed <= generated
    assert truth.total(truth.certain) <= generated <= truth.total(truth.certain + truth.doubtful)
    print(f"received {received}, billed {billed}, generated {generated}")


def test_money_is_exact(outcome: Outcome) -> None:
    """Each row's cost is its tokens at their prices; what is reserved is paid by the minute."""
    for row in outcome.rows.values():
        price = Price(input=row.price_input, cached=row.price_cached, output=row.price_output)
        assert price == (PRICE if row.mode == "pay_per_token" else Price()), row
        tokens = {"prompt": row.prompt_tokens, "cached": row.cached_tokens, "completion": row.completion_tokens}
        assert row.cost == cost(price, **tokens), row


def test_every_row_is_in_the_chain(outcome: Outcome) -> None:
    """However often workers were killed while they linked rows, each row has its link, and the chain is whole."""
    while extend(outcome.store, 0, wait=True):
        pass
    report = check(outcome.store)
    assert (report.rows, report.waiting, report.problems) == (len(outcome.rows), 0, [])


def test_no_limit_is_exceeded(outcome: Outcome) -> None:
    """In no window of 60 s (an hour, for ever) did a tenant get more than its limit; windows equal the ledger.

    A request counts from the second in which it was charged: one that came while the store was locked was admitted up
    to two seconds after it had started.
    """
    check_integrity(outcome.store)
    query = sa.select(ledger.c.request_id, ledger.c.charged_at)
    found = outcome.store.read(lambda connection: connection.execute(query).all())
    charged = {row.request_id: row.charged_at for row in found}
    amounts = {
        "itpm": lambda row: row.prompt_tokens,
        "otpm": lambda row: row.completion_tokens,
        "qph": lambda row: 1,
        "budget": lambda row: row.cost,
    }
    for kind, amount in amounts.items():
        seconds = {"itpm": 60, "otpm": 60, "qph": 3600, "budget": 10**6}[kind]
        rows = [(charged[row.request_id], amount(row)) for row in outcome.rows.values() if row.tenant == kind]
        for first, _ in rows:
            assert sum(used for at, used in rows if 0 <= at - first <= seconds) <= TIGHT[kind], (kind, first)


def test_concurrency_limits_hold(outcome: Outcome) -> None:
    """Requests of the tenant with a concurrency limit of one never generated side by side.

    Only requests that ended by themselves count: an aborted one is over for the ledger a step before it is for the
    engine.
    """
    own = {row.request_id for row in outcome.rows.values() if row.tenant == "in_flight" and row.status == "ok"}
    for steps in outcome.truth.steps:
        seen = [name for step in steps for name in step & own]
        runs = [name for name, _ in itertools.groupby(seen)]
        assert max(Counter(runs).values(), default=1) == 1
        assert all(len(step & own) <= 1 for step in steps)
