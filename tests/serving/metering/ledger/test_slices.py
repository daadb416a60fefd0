"""Slices of limits: lent to processes, drawn from without locks, and exact over all of them."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from ledger_rows import end_breaker, reservation, rows_of
from postgres_databases import new_database

from mlflow_llm.serving.interface.errors import LimitExceeded, PermissionDenied, Unavailable
from mlflow_llm.serving.metering import Ledger, Limits, Store
from mlflow_llm.serving.metering.accounts import windows
from mlflow_llm.serving.metering.accounts.limits import Bound, check_integrity
from mlflow_llm.serving.metering.ledger import fenced
from mlflow_llm.serving.metering.ledger.lending import LEASE_SECONDS
from mlflow_llm.serving.metering.ledger.slices import IDLE_SECONDS, WANTED_PER_SECOND
from mlflow_llm.serving.metering.store.tables import ledger as ledger_table
from mlflow_llm.serving.metering.store.tables import windows as window_table

BIG = 10**9


@pytest.fixture
def store(postgres_server: str) -> Iterator[Store]:
    opened = Store(new_database(postgres_server))
    yield opened
    opened.close()


@pytest.fixture
def gateway(store: Store, tmp_path: Path, clock: Any) -> Iterator[Callable[[], Ledger]]:
    """Return a function that opens one more gateway on the store, on a host of its own."""
    opened: list[Ledger] = []

    def make() -> Ledger:
        made = Ledger(store, state_dir=tmp_path / f"state-{len(opened)}", clock=clock, monotonic=clock)
        opened.append(made)
        made.lend()  # from now on it asks for slices
        return made

    yield make
    for one in opened:
        one.close()


class Spy:
    """The numbers of requests and of settlements that were written under a fence."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.admitted = self.closed = 0
        insert, close_rows = fenced.insert, fenced.close_rows

        def inserting(connection: sa.Connection, drawn: Any) -> bool:
            written = insert(connection, drawn)
            self.admitted += len(drawn) if written else 0
            return written

        def closing(connection: sa.Connection, closings: Any, drawn: Any) -> set[str]:
            done = close_rows(connection, closings, drawn)
            self.closed += len(done)
            return done

        patched.setattr(fenced, "insert", inserting)
        patched.setattr(fenced, "close_rows", closing)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def ids() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"request-{number}"


NAMES = ids()


def use(ledger: Ledger, count: int = 1, **changes: object) -> None:
    """Admit and settle requests of 5 tokens each."""
    for _ in range(count):
        with ledger.reserve(reservation(next(NAMES), **changes)) as lease:
            lease.count(5)


def warm(ledger: Ledger) -> None:
    """Make so many requests that slices are lent."""
    use(ledger, WANTED_PER_SECOND)
    assert ledger.lend()


def state_of(store: Store, scope: str, subject: str) -> windows.WindowState:
    query = sa.select(window_table.c.state).where(window_table.c.scope == scope, window_table.c.subject == subject)
    return windows.decode(store.read(lambda connection: connection.execute(query).scalar_one()))


def exact(store: Store, scope: str, subject: str, *kinds: windows.Kind) -> None:
    """Require that nothing is lent, and that windows and rows are the same."""
    assert state_of(store, scope, subject).lent == {}
    check_integrity(store)


def return_slices(ledger: Ledger, clock: Any) -> None:
    clock.now += IDLE_SECONDS + 1
    while ledger.lend():
        pass


def test_requests_draw_from_slices_and_the_windows_get_what_they_used(
    store: Store, gateway: Callable[[], Ledger], spy: Spy, clock: Any
) -> None:
    """Requests of a busy caller are admitted and settled from slices; when these are back, windows equal rows."""
    for kind in windows.KINDS:
        Limits(store).set("tenant", "acme", kind, BIG)
    Limits(store).set("key", "key_1", "qpm", BIG)
    ledger = gateway()
    warm(ledger)
    assert spy.admitted == 0
    use(ledger, 20)
    assert (spy.admitted, spy.closed) == (20, 20)
    check_integrity(store)  # what is lent covers what the windows lack
    ledger.lend()
    use(ledger, 20)
    assert spy.admitted == 40
    return_slices(ledger, clock)
    exact(store, "tenant", "acme")
    assert windows.used(state_of(store, "tenant", "acme"), "otpm", int(clock.now)) == 5 * (40 + WANTED_PER_SECOND)
    assert windows.used(state_of(store, "key", "key_1"), "qpm", int(clock.now)) == 40 + WANTED_PER_SECOND


def test_a_request_without_limits_needs_no_slice(store: Store, gateway: Callable[[], Ledger], spy: Spy) -> None:
    """A busy caller without any limit is admitted by the fence alone, and a limit that is set holds at once."""
    ledger = gateway()
    warm(ledger)
    use(ledger, 5)
    assert spy.admitted == 5
    Limits(store).set("tenant", "acme", "qph", WANTED_PER_SECOND + 7)
    use(ledger, 2)
    with pytest.raises(LimitExceeded):
        use(ledger)
    assert spy.admitted == 5


@pytest.mark.parametrize("gateways", [2, 4])
def test_exactly_as_many_are_admitted_as_the_limit_allows(
    store: Store, gateway: Callable[[], Ledger], spy: Spy, gateways: int
) -> None:
    """Over several gateways that lend at the same time, N requests of a limit of N are admitted, and not one more."""
    limit = 400
    Limits(store).set("tenant", "acme", "qph", limit)
    opened = [gateway() for _ in range(gateways)]
    for ledger in opened:
        warm(ledger)
        use(ledger)
    assert spy.admitted == gateways, "nothing was drawn from slices"
    refused: Counter[int] = Counter()

    def client(number: int) -> int:
        admitted, ledger = 0, opened[number % gateways]
        while True:
            try:
                use(ledger)
            except LimitExceeded:
                refused[number] += 1
                return admitted
            admitted += 1
            if admitted % 5 == 0:
                ledger.lend()

    with lenders(opened), ThreadPoolExecutor(12) as threads:
        assert sum(threads.map(client, range(12))) == limit - gateways * (WANTED_PER_SECOND + 1)
    for ledger in opened:
        ledger.close()
    exact(store, "tenant", "acme")
    assert len(rows_of(store)) == limit


@contextlib.contextmanager
def lenders(opened: list[Ledger]) -> Iterator[None]:
    """Run the rounds of lending of gateways on threads, as ``start`` does."""
    import threading

    done = threading.Event()

    def work(ledger: Ledger) -> None:
        while not done.wait(0.01):
            ledger.lend()

    with ThreadPoolExecutor(len(opened)) as threads:
        running = [threads.submit(work, ledger) for ledger in opened]
        try:
            yield
        finally:
            done.set()
    for one in running:
        one.result()


def test_nobody_is_refused_while_another_gateway_has_room(
    store: Store, gateway: Callable[[], Ledger], spy: Spy
) -> None:
    """A request that needs what is lent to an idle gateway recalls it, and is admitted when it is back."""
    Limits(store).set("tenant", "acme", "qph", 100)
    idle, busy = gateway(), gateway()
    warm(idle)
    lent = state_of(store, "tenant", "acme").lent
    assert sum(one.amounts.queries for one in lent.values()) > 0
    with lenders([idle, busy]):
        use(busy, 100 - WANTED_PER_SECOND)
        with pytest.raises(LimitExceeded):
            use(busy)
    check_integrity(store)


def test_near_a_limit_nothing_is_lent(store: Store, gateway: Callable[[], Ledger], spy: Spy) -> None:
    """If a quarter of what is left is less than a request, each one is checked in the store."""
    Limits(store).set("tenant", "acme", "qph", WANTED_PER_SECOND + 3)
    ledger = gateway()
    use(ledger, WANTED_PER_SECOND)
    ledger.lend()
    assert state_of(store, "tenant", "acme").lent == {}
    use(ledger, 3)
    with pytest.raises(LimitExceeded):
        use(ledger)
    assert spy.admitted == 0


def test_slices_of_a_dead_gateway_come_back(
    store: Store, gateway: Callable[[], Ledger], spy: Spy, clock: Any, tmp_path: Path
) -> None:
    """The charges that a dead gateway has not reported count by its rows once its slices have ended; the rest of them
    is free again within a minute."""
    Limits(store).set("tenant", "acme", "qph", 100)
    dead, other = gateway(), gateway()
    warm(dead)
    use(dead, 3)
    assert spy.admitted == 3
    abandon(dead)
    left = 100 - WANTED_PER_SECOND - 3
    lent = sum(one.amounts.queries for one in state_of(store, "tenant", "acme").lent.values())
    use(other, 100 - WANTED_PER_SECOND - lent)
    with pytest.raises(LimitExceeded):  # nobody gives it back
        use(other)
    clock.now += LEASE_SECONDS + 1
    assert LEASE_SECONDS < 60
    use(other, lent - 3)
    with pytest.raises(LimitExceeded):
        use(other)
    assert left == 100 - WANTED_PER_SECOND - lent + lent - 3
    exact(store, "tenant", "acme")


def abandon(ledger: Ledger) -> None:
    """Let ``ledger`` do nothing more about its slices, as if its process were gone."""

    def gone() -> bool:
        return False

    pytest.MonkeyPatch().setattr(ledger, "lend", gone)


def test_a_gateway_that_was_taken_for_dead_admits_by_the_windows(
    store: Store, gateway: Callable[[], Ledger], spy: Spy, clock: Any
) -> None:
    """The slices of a gateway that was stopped for too long are void: its next request is checked in the store, and
    the settlement of one that it had admitted before is credited there."""
    Limits(store).set("tenant", "acme", "otpm", 10_000)
    stopped, other = gateway(), gateway()
    warm(stopped)
    running = stopped.reserve(reservation("running", max_output_tokens=100))
    assert spy.admitted == 1
    clock.now += LEASE_SECONDS + 1
    use(other)
    check_integrity(store)
    assert state_of(store, "tenant", "acme").lent == {}
    use(stopped)
    assert spy.admitted == 1
    running.count(7)
    running.settle()
    assert spy.closed == 0
    exact(store, "tenant", "acme")


def test_a_limit_that_changes_holds_at_once(store: Store, gateway: Callable[[], Ledger], spy: Spy) -> None:
    """The first request after a limit was lowered, raised or removed is checked by what it is now."""
    Limits(store).set("tenant", "acme", "qph", BIG)
    ledger = gateway()
    warm(ledger)
    use(ledger, 4)
    with lenders([ledger]):
        Limits(store).set("tenant", "acme", "qph", WANTED_PER_SECOND + 5)
        use(ledger)
        with pytest.raises(LimitExceeded):
            use(ledger)
        Limits(store).set("tenant", "acme", "qph", WANTED_PER_SECOND + 6)
        use(ledger)
        with pytest.raises(LimitExceeded):
            use(ledger)
        Limits(store).remove("tenant", "acme", "qph")
        use(ledger, 3)
        Limits(store).set("tenant", "acme", "qph", WANTED_PER_SECOND + 10)
        use(ledger)
        with pytest.raises(LimitExceeded):
            use(ledger)
    check_integrity(store)


def test_a_new_kind_of_limit_counts_what_slices_were_charged(
    store: Store, gateway: Callable[[], Ledger], spy: Spy
) -> None:
    """A limit of a kind that was free when slices were lent counts all requests before it."""
    Limits(store).set("tenant", "acme", "otpm", BIG)
    idle, ledger = gateway(), gateway()
    warm(idle)
    use(idle, 4)
    Limits(store).set("tenant", "acme", "qph", WANTED_PER_SECOND + 6)
    with lenders([idle, ledger]):
        use(ledger, 2)
        with pytest.raises(LimitExceeded):
            use(ledger)
        with pytest.raises(LimitExceeded):
            use(idle)


def test_requests_in_flight_are_lent(store: Store, gateway: Callable[[], Ledger], spy: Spy) -> None:
    """A slot of a request that has ended is used again by its process, without asking; all of them are the limit's."""
    Limits(store).set("tenant", "acme", "in_flight", 40)
    ledger, other = gateway(), gateway()
    warm(ledger)
    use(ledger, 50)
    assert spy.admitted == 50
    with lenders([ledger, other]):
        held = [(ledger, other)[i % 2].reserve(reservation(next(NAMES))) for i in range(40)]
        for one in (ledger, other):
            with pytest.raises(LimitExceeded):
                use(one)
        for lease in held:
            lease.settle()
        use(other)
    for one in (ledger, other):
        one.close()
    exact(store, "tenant", "acme")


def test_a_spent_budget_is_spent_to_the_last_unit(store: Store, gateway: Callable[[], Ledger], spy: Spy) -> None:
    """Money is lent like tokens: over two gateways a budget is never exceeded, and what was reserved comes back."""
    from mlflow_llm.serving.metering.accounts.money import Price
    from mlflow_llm.serving.metering.accounts.prices import Prices

    Prices(store).set("model-1", Price(input=0, cached=0, output=1_000_000))
    opened = [gateway(), gateway()]
    Limits(store).set("tenant", "acme", "budget", 1000)
    with lenders(opened):
        admitted = 0
        while True:
            try:
                use(opened[admitted % 2], max_output_tokens=5)
            except PermissionDenied:
                break
            admitted += 1
    assert admitted == 200
    assert spy.admitted > 0
    assert sum(row.cost for row in rows_of(store).values()) == 1000


def seconds_of(store: Store) -> Counter[int]:
    query = sa.select(ledger_table.c.charged_at)
    return Counter(store.read(lambda connection: list(connection.execute(query).scalars())))


def test_windows_roll_over_while_slices_are_lent(
    store: Store, gateway: Callable[[], Ledger], spy: Spy, clock: Any
) -> None:
    """In no 60 seconds more is admitted than the limit, whenever slices were lent and drawn from."""
    Limits(store).set("tenant", "acme", "qpm", 60)
    opened = [gateway(), gateway()]
    drawn = random.Random(7)
    for _ in range(400):
        clock.now += drawn.choice((0, 0, 0, 1, 3))
        ledger = drawn.choice(opened)
        with lenders(opened), contextlib.suppress(LimitExceeded):
            use(ledger, drawn.randrange(1, 9))
    charged = seconds_of(store)
    for last in charged:
        assert sum(n for at, n in charged.items() if last - 60 < at <= last) <= 60
    assert sum(charged.values()) > 60


def test_a_lost_answer_is_found_out(
    store: Store, gateway: Callable[[], Ledger], spy: Spy, monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    """If the answers to an admission, a settlement or a report are lost, windows and rows are the same in the end."""
    Limits(store).set("tenant", "acme", "qph", BIG)
    Limits(store).set("tenant", "acme", "otpm", BIG)
    ledger = gateway()
    warm(ledger)
    write = store.write

    def losing(work: Any, *, timeout: float | None = None) -> Any:
        write(work, timeout=timeout)
        raise Unavailable("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(store, "write", losing)
        with pytest.raises(Unavailable):
            use(ledger)
    end_breaker(ledger)
    ledger.maintain()
    ledger.lend()
    check_integrity(store)
    warm(ledger)
    lease = ledger.reserve(reservation("settled"))
    with monkeypatch.context() as patched:
        patched.setattr(store, "write", losing)
        lease.settle()
        with pytest.raises(Unavailable):
            ledger.lend()
    ledger.maintain()
    warm(ledger)
    use(ledger, 3)
    with monkeypatch.context() as patched:
        patched.setattr(store, "write", losing)
        with pytest.raises(Unavailable):
            ledger.lend()
    end_breaker(ledger)
    use(ledger, 2)
    ledger.maintain()
    return_slices(ledger, clock)
    exact(store, "tenant", "acme")
    assert not [row for row in rows_of(store).values() if row.status == "open"]


def test_a_gateway_that_ends_returns_its_slices(store: Store, gateway: Callable[[], Ledger], spy: Spy) -> None:
    """After the end of a gateway in order, nothing is lent to it and its windows equal the rows."""
    Limits(store).set("tenant", "acme", "qph", BIG)
    ledger = gateway()
    warm(ledger)
    use(ledger, 5)
    ledger.close()
    exact(store, "tenant", "acme")


def test_a_removed_window_takes_its_slices_with_it(store: Store, gateway: Callable[[], Ledger], spy: Spy) -> None:
    """A limit that is removed and set again finds a window built from the rows, and old slices are void."""
    Limits(store).set("tenant", "acme", "qph", 30)
    ledger = gateway()
    warm(ledger)
    use(ledger, 2)
    assert spy.admitted == 2
    Limits(store).remove("tenant", "acme", "qph")
    Limits(store).set("tenant", "acme", "qph", 30)
    use(ledger, 30 - WANTED_PER_SECOND - 2)
    with pytest.raises(LimitExceeded):
        use(ledger)
    check_integrity(store)


def test_requests_that_a_soft_limit_counts_are_checked_in_the_store(
    store: Store, gateway: Callable[[], Ledger], spy: Spy
) -> None:
    """Each request beyond a soft limit says so, so none draws from a slice, before and after the limit becomes soft."""
    limits = Limits(store)
    limits.set("tenant", "acme", "qpm", WANTED_PER_SECOND + 2)
    ledger = gateway()
    use(ledger, WANTED_PER_SECOND)
    ledger.lend()
    limits.set("tenant", "acme", "qpm", Bound(value=WANTED_PER_SECOND + 2, soft=True))
    drawn = spy.admitted
    beyond = []
    for _ in range(4):
        ledger.lend()
        with ledger.reserve(reservation(next(NAMES))) as lease:
            beyond.append(len(lease.beyond))
    assert beyond == [0, 0, 1, 1]
    assert spy.admitted == drawn
    limits.set("tenant", "acme", "qpm", WANTED_PER_SECOND + 4)
    with pytest.raises(LimitExceeded):
        use(ledger)
