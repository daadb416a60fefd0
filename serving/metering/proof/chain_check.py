"""The check of the ledger's hash chain: which rows and links were altered, removed or doubled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from ..store.store import Store
from ..store.tables import ledger, links
from .canonical import digest, row_hash
from .chain import FOLDED, GENESIS, REPAIRED, head_of, link_hash
from .keys import ProofKeys, find_keys, is_signed

PAGE_ROWS = 500
MAX_PROBLEMS = 1000
"""Problems that are kept; all are counted."""


class Problem(Struct, frozen=True, kw_only=True):
    """A row or a link that is not as it was settled. ``link`` and ``request_id`` are None where there is none."""

    link: int | None
    request_id: str | None
    problem: str


class Head(Struct, frozen=True, kw_only=True):
    """The signed end of a chain: kept elsewhere, it proves later that nothing before it was changed or cut off."""

    sequence: int
    hash: str
    at_ms: int
    signature: str
    public_key: str


class Report(Struct, kw_only=True):
    """The findings of a check.

    ``rows`` have the link that they should have, ``folded`` counts links of rows that are daily sums by now,
    ``waiting`` rows without a link; ``amended`` were linked again by right.
    """

    links: int = 0
    rows: int = 0
    folded: int = 0
    waiting: int = 0
    amended: int = 0
    num_problems: int = 0
    problems: list[Problem] = []
    head: Head | None = None

    def add(self, problem: str, *, link: int | None = None, request_id: str | None = None) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(link=link, request_id=request_id, problem=problem))


def head(store: Store) -> Head | None:
    """Return the signed end of the chain; None where nothing was linked yet."""
    return store.read(_head)


def check(store: Store, kept: Head | None = None) -> Report:
    """Check every link, and the row of each; with ``kept``, that the chain still contains this head.

    It reads page by page and may run beside servers. The ledger's unlinked rows are not examined, only counted.
    """
    run = _Check(store.read(find_keys))
    while store.read(lambda connection: run.page(connection, store)):
        pass
    if kept is not None:
        run.check_kept(kept, store)
    return run.report


class _Check:
    def __init__(self, keys: ProofKeys | None) -> None:
        self.report = Report()
        self._keys = keys
        self._previous = GENESIS
        self._last = 0
        self._superseded: dict[str, tuple[int, str]] = {}  # by request: the link, and its kind
        self._is_ended = True  # the last link is signed

    def page(self, connection: sa.Connection, store: Store) -> bool:
        """Check the next links, and return whether there may be more."""
        if not store.is_sqlite:  # links and rows as they were at one moment
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        query = sa.select(links).where(links.c.sequence > self._last).order_by(links.c.sequence).limit(PAGE_ROWS)
        found = connection.execute(query).all()
        rows = _rows(connection, [link.request_id for link in found])
        for link in found:
            self._check_link(link)
            if link.kind == FOLDED:
                self._check_fold(connection, link)
            else:
                self._check_row(link, rows.get(link.request_id))
        if len(found) == PAGE_ROWS:
            return True
        self._check_end(connection)
        return False

    def _check_link(self, link: Any) -> None:
        report = self.report
        report.links += 1
        if link.sequence != self._last + 1:
            report.add(f"{_span(self._last + 1, link.sequence - 1)} removed", link=link.sequence)
        elif link.previous != self._previous:
            report.add("does not follow from the link before it, which was altered", link=link.sequence)
        if link.hash != link_hash(link):
            report.add("the link was altered", link=link.sequence, request_id=link.request_id or None)
        if link.signature is not None and not self._is_signed(link):
            report.add("its signature is not that of this store's key", link=link.sequence)
        self._last, self._previous, self._is_ended = link.sequence, link.hash, link.signature is not None

    def _is_signed(self, link: Any) -> bool:
        signed = head_of(link.sequence, link.hash, link.at_ms)
        return self._keys is not None and is_signed(self._keys.public, signed, link.signature)

    def _check_row(self, link: Any, row: sa.RowMapping | None) -> None:
        report, number, name = self.report, link.sequence, link.request_id
        if (before := self._superseded.pop(name, None)) is not None:
            if before[1] != "recovered" and link.kind != REPAIRED:
                report.add(
                    f"changed after it was settled: links {before[0]} and {number}", link=number, request_id=name
                )
            else:
                report.amended += 1
        if link.folded_by is not None:
            if row is not None:
                report.add("the row was folded, and is there again", link=number, request_id=name)
        elif row is None:
            report.add("the row was removed", link=number, request_id=name)
        elif row["chained"] is None:
            if link.kind != "recovered":
                report.add("the row was altered, or settled again", link=number, request_id=name)
        elif row["chained"] > number:
            self._superseded[name] = (number, link.kind)
        elif row["chained"] < number:
            report.add(f"the row is linked twice, by {row['chained']} and {number}", link=number, request_id=name)
        elif row_hash(row) != link.row_hash:
            report.add("the row was altered", link=number, request_id=name)
        else:
            report.rows += 1

    def _check_fold(self, connection: sa.Connection, link: Any) -> None:
        query = sa.select(links.c.sequence, links.c.row_hash).where(links.c.folded_by == link.sequence)
        found = [list(one) for one in connection.execute(query.order_by(links.c.sequence))]
        if digest(found) != link.row_hash:
            problem = "the rows that were folded are not those of its links: some were removed, altered or added"
            self.report.add(problem, link=link.sequence)
        self.report.folded += len(found)

    def _check_end(self, connection: sa.Connection) -> None:
        report = self.report
        if not self._is_ended:
            report.add("the chain ends without a signature: links at its end were removed", link=self._last)
        report.head = _head(connection)
        for name, (number, _) in self._superseded.items():
            report.add("its newer link was removed", link=number, request_id=name)
        for number in connection.execute(_unfolded).scalars():
            report.add(f"the link of a fold, {number}, was removed")
        for name, number in connection.execute(_beyond, {"last": self._last}):
            report.add(f"its link {number} was removed from the end of the chain", request_id=name)
        for name, number in connection.execute(_misplaced):
            report.add("the row was added: its link is another row's", link=number, request_id=name)
        for nonce in connection.execute(_doubled).scalars():
            names = connection.execute(sa.select(ledger.c.request_id).where(ledger.c.nonce == nonce)).scalars()
            report.add(f"the row was doubled: {', '.join(sorted(names))}")
        report.waiting = connection.execute(_waiting).scalar_one()

    def check_kept(self, kept: Head, store: Store) -> None:
        """Check that the chain contains a head that was kept elsewhere, signed by the same key."""
        report, told = self.report, f"the kept head, link {kept.sequence}"
        public = bytes.fromhex(kept.public_key)
        if not is_signed(public, head_of(kept.sequence, kept.hash, kept.at_ms), kept.signature):
            report.add(f"{told}, has no valid signature")
        elif self._keys is None or self._keys.public != public:
            report.add(f"{told}, was signed by another key than this store's")
        query = sa.select(links.c.hash).where(links.c.sequence == kept.sequence)
        found = store.read(lambda connection: connection.execute(query).scalar_one_or_none())
        if found != kept.hash:
            report.add(f"{told}, is not in the chain: {'it was removed' if found is None else 'another is there'}")


_beyond = sa.select(ledger.c.request_id, ledger.c.chained).where(ledger.c.chained > sa.bindparam("last"))
_misplaced = (
    sa.select(ledger.c.request_id, ledger.c.chained)
    .join(links, links.c.sequence == ledger.c.chained)
    .where(links.c.request_id != ledger.c.request_id)
    .order_by(ledger.c.request_id)
    .limit(MAX_PROBLEMS)
)
_doubled = (
    sa.select(ledger.c.nonce).group_by(ledger.c.nonce).having(sa.func.count() > 1).order_by(ledger.c.nonce)
).limit(MAX_PROBLEMS)
_folds = links.alias()
_unfolded = (
    sa.select(links.c.folded_by)
    .distinct()
    .where(links.c.folded_by.is_not(None))
    .where(~sa.exists().where(_folds.c.sequence == links.c.folded_by, _folds.c.kind == FOLDED))
    .order_by(links.c.folded_by)
)
_waiting = sa.select(sa.func.count()).select_from(ledger).where(ledger.c.status != "open", ledger.c.chained.is_(None))


def _head(connection: sa.Connection) -> Head | None:
    query = sa.select(links).where(links.c.signature.is_not(None)).order_by(links.c.sequence.desc()).limit(1)
    link, keys = connection.execute(query).one_or_none(), find_keys(connection)
    if link is None or keys is None:
        return None
    return Head(
        sequence=link.sequence,
        hash=link.hash,
        at_ms=link.at_ms,
        signature=link.signature,
        public_key=keys.public.hex(),
    )


def _rows(connection: sa.Connection, names: Sequence[str]) -> dict[str, sa.RowMapping]:
    query = sa.select(ledger).where(ledger.c.request_id.in_(names))
    return {row["request_id"]: row for row in connection.execute(query).mappings()}


def _span(first: int, last: int) -> str:
    return f"link {first} was" if first == last else f"links {first} to {last} were"


def lines(report: Report) -> Iterator[str]:
    """Yield the report as lines of text, problems first."""
    for one in report.problems:
        where = [f"link {one.link}"] if one.link is not None else []
        where += [f"request {one.request_id}"] if one.request_id is not None else []
        yield f"{', '.join(where) or 'ledger'}: {one.problem}"
    if report.num_problems > len(report.problems):
        yield f"and {report.num_problems - len(report.problems)} more"
    counts = f"{report.links} links, {report.rows} rows as they were settled, {report.folded} of folded days"
    yield f"{counts}, {report.amended} amended, {report.waiting} waiting for their links"
