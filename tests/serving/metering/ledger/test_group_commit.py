"""Group commit: requests that arrive during a transaction share the next one, as exactly as one by one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from ledger_rows import rows_of
from server_calls import until

from mlflow_llm.serving.interface.errors import AlreadyExists, LimitExceeded, RequestError
from mlflow_llm.serving.metering import Ledger, Limits, Store
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.accounts.money import Price
from mlflow_llm.serving.metering.ledger import admission
from mlflow_llm.serving.metering.ledger.lease import Bucket
from mlflow_llm.serving.metering.ledger.settlement import Settlement, settle_all
from mlflow_llm.serving.metering.store.group_commit import MAX_GROUP, GroupCommit


class Held:
    """A ``run`` whose groups each wait for a turn; ``groups`` are those that have begun."""

    def __init__(self) -> None:
        self.groups: list[list[Any]] = []
        self.turns = threading.Semaphore(0)
        self.raises: BaseException | None = None

    def __call__(self, items: Sequence[Any]) -> list[Any]:
        self.groups.append(list(items))
        assert self.turns.acquire(timeout=240)
        if self.raises is not None:
            raised, self.raises = self.raises, None
            raise raised
        return [ValueError(item) if item == "bad" else f"done {item}" for item in items]


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def call(held: Held) -> Iterator[Callable[..., Future[Any]]]:
    """Return a function that hands in an item on a thread of its own, and returns when it waits or runs."""
    group: GroupCommit[Any, Any] = GroupCommit(held)
    with ThreadPoolExecutor(2 * MAX_GROUP) as threads:

        def hand_in(item: object, lane: str = "a") -> Future[Any]:
            before = sum(map(len, held.groups)) + group.waiting
            future = threads.submit(group, lane, item)
            until(lambda: future.done() or sum(map(len, held.groups)) + group.waiting > before)
            return future

        yield hand_in
        held.turns.release(1000)


def test_items_that_wait_run_together(held: Held, call: Callable[..., Future[Any]]) -> None:
    """The items that arrive during a group are the next group, each with an outcome of its own."""
    first = call(0)
    rest = [call(item) for item in (1, "bad", 2)]
    other = call("x", lane="b")
    until(lambda: held.groups == [[0], ["x"]])  # a lane does not wait for another
    held.turns.release(3)
    assert (first.result(240), other.result(240)) == ("done 0", "done x")
    assert [rest[0].result(240), rest[2].result(240)] == ["done 1", "done 2"]
    assert isinstance(rest[1].exception(240), ValueError)
    assert held.groups[2] == [1, "bad", 2]


def test_a_group_has_a_size(held: Held, call: Callable[..., Future[Any]]) -> None:
    """If many items wait, the first ones go together and the others after them."""
    futures = [call(item) for item in range(MAX_GROUP + 3)]
    held.turns.release(3)
    assert [future.result(240) for future in futures] == [f"done {item}" for item in range(MAX_GROUP + 3)]
    assert [len(group) for group in held.groups] == [1, MAX_GROUP, 2]


def test_a_killed_leader_takes_nobody_with_it(held: Held, call: Callable[..., Future[Any]]) -> None:
    """If the caller that leads a group is killed, the others of the group hand their items in again."""
    first = call(0)
    leader, other = call(1), call(2)
    held.turns.release(1)
    assert first.result(240) == "done 0"
    until(lambda: len(held.groups) == 2)
    held.raises = SystemExit()
    held.turns.release(1)
    assert isinstance(leader.exception(240), SystemExit)
    held.turns.release(1)
    assert other.result(240) == "done 2"
    assert held.groups == [[0], [1, 2], [2]]


def test_a_caller_that_is_killed_while_it_waits_passes_its_turn_on(
    held: Held, call: Callable[..., Future[Any]]
) -> None:
    """An item whose caller was killed while it waited does not run, and the lane goes on."""
    group: GroupCommit[Any, Any] = GroupCommit(held)
    assert held.turns.acquire(blocking=False) is False
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(group, "a", 0)
        until(lambda: held.groups == [[0]])

        class Killed:
            def set(self) -> None: ...

            def wait(self) -> None:
                raise SystemExit

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("mlflow_llm.serving.metering.store.group_commit.make_signal", Killed)
            with pytest.raises(SystemExit):
                group("a", 1)
        assert group.waiting == 0
        held.turns.release(2)
        assert first.result(240) == "done 0"
        assert threads.submit(group, "a", 2).result(240) == "done 2"


@contextlib.contextmanager
def held_back(ledger: Ledger, reserve_of: Callable[..., Any], waiters: int) -> Iterator[Callable[..., Future[Any]]]:
    """Yield a function that reserves on a thread; all reservations but the first wait until ``waiters`` do."""
    gate, began, write = threading.Event(), threading.Event(), ledger.store.write

    def gated(work: Any, *, timeout: float | None = None) -> Any:
        began.set()
        assert gate.wait(240)
        return write(work, timeout=timeout)

    with ThreadPoolExecutor(waiters + 1) as threads, pytest.MonkeyPatch.context() as patched:
        patched.setattr(ledger.store, "write", gated)
        first = threads.submit(ledger.reserve, reserve_of("first"))
        assert began.wait(240)

        def reserve(request_id: str, **changes: object) -> Future[Any]:
            return threads.submit(ledger.reserve, reserve_of(request_id, **changes))

        try:
            yield reserve
            until(lambda: ledger.waiting == waiters)
        finally:
            gate.set()
        first.result(240)


def test_a_group_never_exceeds_a_limit(store: Store, ledger: Ledger, reserve_of: Callable[..., Any]) -> None:
    """Exactly as many of ten requests in one transaction are admitted as fit, and each of the others is refused."""
    Limits(store).set("tenant", "acme", "otpm", 20 * 6)
    Limits(store).set("tenant", "acme", "budget", 10**6)
    ledger.prices.set("model-1", Price(input=1, cached=0, output=10))
    with held_back(ledger, reserve_of, 10) as reserve:
        futures = [reserve(f"r{number}") for number in range(10)]
    errors = [future.exception(240) for future in futures]
    assert [type(error) for error in errors if error] == [LimitExceeded] * 5  # the first took one of six
    leases = [future.result() for future in futures if not future.exception()]
    assert len(rows_of(store)) == 6
    check_integrity(store)
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(lambda lease: lease.settle(completion=3), leases))
    assert sorted(row.completion_tokens for row in rows_of(store).values()) == [0, 3, 3, 3, 3, 3]
    check_integrity(store)


def test_a_request_id_in_use_spoils_no_group(store: Store, ledger: Ledger, reserve_of: Callable[..., Any]) -> None:
    """In a group with an id that is in the ledger already, that request alone is refused."""
    Limits(store).set("tenant", "acme", "in_flight", 100)
    ledger.reserve(reserve_of("used")).settle()
    with held_back(ledger, reserve_of, 3) as reserve:
        futures = [reserve("new1"), reserve("used"), reserve("new2")]
    assert [type(future.exception(240)) for future in futures] == [type(None), AlreadyExists, type(None)]
    assert set(rows_of(store)) == {"first", "used", "new1", "new2"}
    check_integrity(store)


def test_a_group_whose_answer_was_lost_is_recognised(
    store: Store, ledger: Ledger, reserve_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a group was committed and the answer was lost, each of its requests is admitted once."""
    Limits(store).set("tenant", "acme", "in_flight", 100)
    ledger.reserve(reserve_of("r0")).settle()  # the window exists
    real, lost = admission.reserve_all, [True]

    def reserve_all(connection: sa.Connection, *arguments: Any, **options: Any) -> Any:
        replies = real(connection, *arguments, **options)
        if len(replies) > 1 and lost:
            lost.clear()
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("COMMIT")
                connection.exec_driver_sql("BEGIN")
            raise sa.exc.OperationalError("commit", None, Exception("the connection is gone"))
        return replies

    monkeypatch.setattr(admission, "reserve_all", reserve_all)
    with held_back(ledger, reserve_of, 2) as reserve:
        futures = [reserve("r1"), reserve("r2")]
    assert [future.result(240).request_id for future in futures] == ["r1", "r2"]
    assert not lost
    assert set(rows_of(store)) == {"first", "r0", "r1", "r2"}
    check_integrity(store)


def test_an_admission_whose_answer_was_lost_is_not_refused(
    store: Store, ledger: Ledger, reserve_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the answer to the admission that fills a limit was lost, the next attempt is not refused for its own row."""
    Limits(store).set("tenant", "acme", "in_flight", 1)
    ledger.reserve(reserve_of("r0")).settle()  # the window exists
    real, lost = admission.reserve_all, [True]

    def reserve_all(connection: sa.Connection, *arguments: Any, **options: Any) -> Any:
        replies = real(connection, *arguments, **options)
        if lost:
            lost.clear()
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("COMMIT")
                connection.exec_driver_sql("BEGIN")
            raise sa.exc.OperationalError("commit", None, Exception("the connection is gone"))
        return replies

    monkeypatch.setattr(admission, "reserve_all", reserve_all)
    ledger.reserve(reserve_of("r1")).settle(completion=3)
    assert rows_of(store)["r1"].completion_tokens == 3
    check_integrity(store)


def test_a_group_takes_from_one_bucket_in_turn(ledger: Ledger, store: Store, reserve_of: Callable[..., Any]) -> None:
    """Requests of a group share a provisioned reserve as one after the other would."""
    bucket = Bucket(rate=1, burst_seconds=70, prompt_weight_milli=0)
    with held_back(ledger, reserve_of, 4) as reserve:
        futures = [reserve(f"r{number}", bucket=bucket) for number in range(4)]
    leases = [future.result(240) for future in futures]
    assert sorted(lease.within_reserve for lease in leases) == [False, True, True, True]
    for lease in leases:
        lease.settle(completion=0)
    assert len(rows_of(store)) == 5


def test_settlements_of_one_row_in_a_group_count_once(
    store: Store, ledger: Ledger, reserve_of: Callable[..., Any]
) -> None:
    """The first settlement of a row wins, in one transaction as in several, and an unknown one changes nothing."""
    Limits(store).set("tenant", "acme", "otpm", 1000)
    ledger.reserve(reserve_of("r1"))
    ledger.reserve(reserve_of("r2"))

    def of(request_id: str, completion: int, status: Any = "ok") -> Settlement:
        return Settlement(
            request_id=request_id,
            prompt=10,
            cached=0,
            completion=completion,
            finish_reason=None,
            status=status,
            ended_ms=0,
        )

    group = [of("r2", 4, "recovered"), of("r1", 3), of("nobody", 1), of("r1", 5), of("r2", 6)]
    assert store.write(lambda connection: settle_all(connection, group)) == [True, True, False, False, True]
    assert {name: row.completion_tokens for name, row in rows_of(store).items()} == {"r1": 3, "r2": 6}
    check_integrity(store)


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_connections_that_the_database_closed_are_replaced(
    store: Store, ledger: Ledger, reserve_of: Callable[..., Any]
) -> None:
    """After the database has closed every idle connection, requests are admitted and settled without an error."""
    lease = ledger.reserve(reserve_of("r1"))
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid != %s"
    for done in (lambda: lease.settle(completion=3), lambda: ledger.reserve(reserve_of("r2")).settle(completion=1)):
        engine = sa.create_engine(store.engine.url)
        with engine.connect() as connection:
            own = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            connection.exec_driver_sql(others, (own,))
        engine.dispose()
        done()
    assert {name: row.completion_tokens for name, row in rows_of(store).items()} == {"r1": 3, "r2": 1}
    assert ledger.status().spooled == 0


class CountingProxy:
    """A TCP proxy that counts round trips: how often the client sends after the server has answered."""

    def __init__(self, port: int) -> None:
        self._target, self.trips = port, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            answered = threading.Event()
            answered.set()
            for source, sink, is_client in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(source, sink, is_client, answered))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_client: bool, answered: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not is_client:
                    answered.set()
                elif answered.is_set():
                    answered.clear()
                    self.trips += 1
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(240)


@pytest.fixture
def counted(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, CountingProxy]]:
    """Open a store whose round trips are counted; prices are read once."""
    monkeypatch.setattr("mlflow_llm.serving.metering.accounts.prices.CACHE_SECONDS", 600.0)
    url = sa.make_url(store_url)
    assert url.port is not None
    proxy = CountingProxy(url.port)
    try:
        store = Store(url.set(port=proxy.port).render_as_string(hide_password=False))
        yield store, proxy
        store.close()
    finally:
        proxy.close()


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_round_trips_of_a_request(
    counted: tuple[Store, CountingProxy], tmp_path: Path, reserve_of: Callable[..., Any]
) -> None:
    """A request with limits costs two round trips to PostgreSQL to be admitted, or refused, and two to be settled."""
    store, proxy = counted
    ledger = Ledger(store, state_dir=tmp_path / "state")
    for kind, value in (("itpm", 1000), ("otpm", 1000), ("qpm", 1000), ("in_flight", 3), ("budget_day", 10**9)):
        for scope, subject in (("tenant", "acme"), ("key", "key_1"), ("endpoint", "chat")):
            Limits(store).set(scope, subject, kind, value)

    def trips(work: Callable[[], object]) -> int:
        before = proxy.trips
        work()
        return proxy.trips - before

    leases: list[Any] = []
    for number in range(12):  # statements are prepared meanwhile
        leases.append(ledger.reserve(reserve_of(f"r{number}")))
        leases.pop().settle(completion=1)
    assert trips(lambda: leases.append(ledger.reserve(reserve_of("a")))) == 2
    assert trips(lambda: leases[0].settle(completion=1)) == 2
    for number in range(3):
        leases.append(ledger.reserve(reserve_of(f"b{number}")))

    def refused() -> None:
        with pytest.raises(RequestError, match="in_flight"):
            ledger.reserve(reserve_of("c"))

    assert trips(refused) == 2
    for lease in leases:
        lease.settle()
    ledger.close()


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_round_trips_of_a_request_that_draws_from_slices(
    counted: tuple[Store, CountingProxy], tmp_path: Path, reserve_of: Callable[..., Any]
) -> None:
    """A request of a busy caller with limits costs one round trip to be admitted, and one to be settled."""
    store, proxy = counted
    now = 1_800_000_000.0
    ledger = Ledger(store, state_dir=tmp_path / "state", clock=lambda: now, monotonic=lambda: now)
    for kind in ("itpm", "otpm", "qpm", "in_flight", "budget_day"):
        for scope, subject in (("tenant", "acme"), ("key", "key_1"), ("endpoint", "chat")):
            Limits(store).set(scope, subject, kind, 10**9)
    ledger.lend()
    for number in range(16):
        ledger.reserve(reserve_of(f"r{number}")).settle(completion=1)
    assert ledger.lend()
    for number in range(7):  # statements are prepared meanwhile
        ledger.reserve(reserve_of(f"s{number}")).settle(completion=1)
    before = proxy.trips
    lease = ledger.reserve(reserve_of("a"))
    assert proxy.trips - before == 1
    lease.settle(completion=1)
    assert proxy.trips - before == 2
    ledger.close()
    check_integrity(store)
