"""The payload log in the store: its bounds, ages, deletion and Parquet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import sqlalchemy as sa

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.payload_log import PayloadLog, redacted_json
from mlflow_llm.serving.metering import Audit, AuditFilter, Store
from mlflow_llm.serving.metering.proof.recorded import logged_body
from mlflow_llm.serving.metering.store.tables import endpoints
from mlflow_llm.serving.metering.usage.payloads import Payload, Payloads, write_parquet

NOW = 1_800_000_000_000
ROW: dict[str, Any] = {"creator": "", "description": "", "created_ms": 0, "updated_ms": 0, "tasks": "chat"}
ROW |= {"ready": "READY", "config_update": "NOT_UPDATING", "message": "", "last_version": 1}


@pytest.fixture
def payloads(store: Store) -> Payloads:
    """Return the payload log of a store with the endpoints a and b."""
    rows = [{"name": name, "id": name, **ROW} for name in ("a", "b")]
    store.write(lambda connection: connection.execute(sa.insert(endpoints), rows))
    return Payloads(store)


def payload(number: int, endpoint: str = "a", request: str | None = "{}", **more: Any) -> Payload:
    fields: dict[str, Any] = {"entity": "m-1", "adapter": None, "tenant": "acme", "key_id": "key_1", "sample": 1.0}
    fields |= {"client_request_id": None, "status_code": 200, "started_ms": NOW, "duration_ms": 5, "response": None}
    return Payload(request_id=f"r{number}", endpoint=endpoint, request=request, **fields | more)


def add(payloads: Payloads, rows: Iterable[Payload], now: int = NOW, **settings: Any) -> None:
    payloads.add([(row, PayloadLog(**settings)) for row in rows], now)


def ids(payloads: Payloads, endpoint: str = "a", now: int = NOW) -> list[str]:
    return [row.request_id for row in payloads.rows(endpoint, now)]


def test_rows_come_back_as_they_were_added(payloads: Payloads) -> None:
    """A row keeps all of its fields; pages go from the newest to the oldest, and one request can be asked for."""
    rows = [payload(n, codes=("REQUEST_NOT_JSON", "REDACTION_FAILED"), response="ü") for n in range(5)]
    add(payloads, rows)
    first, cursor = payloads.page("a", NOW, limit=3)
    rest, end = payloads.page("a", NOW, limit=3, cursor=cursor)
    assert ([*first, *rest], end) == (rows[::-1], None)
    assert payloads.page("a", NOW, limit=3, request_id="r1") == ((rows[1],), None)
    assert payloads.logged(["r1", "r9"], NOW) == {"r1"}
    with pytest.raises(InvalidField, match="cursor"):
        payloads.page("a", NOW, limit=3, cursor="x")


def test_the_body_to_repeat_is_never_that_of_a_copy(store: Store, payloads: Payloads) -> None:
    """A shadow's answer is logged under the request's id without its body, and may come first."""
    add(payloads, [payload(1, request=None, shadow=True)])
    assert logged_body(store, "r1") is None
    add(payloads, [payload(1, request='{"prompt": "Hi"}'), payload(1, request=None, shadow=True)])
    assert logged_body(store, "chatcmpl-r1") == b'{"prompt": "Hi"}'


def test_the_oldest_rows_go_first(payloads: Payloads) -> None:
    """More rows than ``max_rows`` never stay, of each endpoint by itself."""
    add(payloads, [payload(0, "b")])
    for number in range(25):
        add(payloads, [payload(number)], max_rows=10)
        assert len(ids(payloads)) <= 10
    kept = ids(payloads)
    assert kept == [f"r{number}" for number in range(24, 24 - len(kept), -1)]
    assert (len(kept) >= 9, ids(payloads, "b")) == (True, ["r0"])


def test_bytes_are_bounded(payloads: Payloads) -> None:
    """The texts of an endpoint never take more than ``max_bytes``; a row that is larger by itself does not stay."""
    for number in range(8):
        add(payloads, [payload(number, request="x" * 20_000, response="é" * 1000)], max_bytes=2**16)
        assert sum(row.size for row in payloads.rows("a", NOW)) <= 2**16
    assert ids(payloads)[0] == "r7"
    add(payloads, [payload(9, request="x" * 70_000)], max_bytes=2**16)
    assert ids(payloads) == []


def test_old_rows_are_not_read_and_pruned(payloads: Payloads) -> None:
    """A row that has reached its age is not shown any more, and is deleted by the next pruning, of all endpoints."""
    add(payloads, [payload(1), payload(2, "b")], max_age=60)
    add(payloads, [payload(3)], max_age=120)
    late = NOW + 60_000
    assert (ids(payloads, now=late), ids(payloads, "b", now=late)) == (["r3"], [])
    assert payloads.logged(["r1", "r2", "r3"], late) == {"r3"}
    assert (payloads.prune(late), payloads.prune(late)) == (2, 0)
    assert ids(payloads, now=NOW) == ["r3"]


def test_deletion_is_audited(store: Store, payloads: Payloads) -> None:
    """All rows of one endpoint are deleted; the audit log has how many, and no text."""
    add(payloads, [payload(1, request='{"secret": 1}'), payload(2), payload(3, "b")])
    assert (payloads.delete("a"), ids(payloads), ids(payloads, "b")) == (2, [], ["r3"])
    ((entry,), _) = Audit(store).page(AuditFilter(action="endpoint.delete_payloads"))
    assert (entry.target, entry.before, entry.after) == ("a", {"payloads": 2}, None)


def test_rows_of_a_deleted_endpoint_are_left_out(payloads: Payloads) -> None:
    """A request that is still queued when its endpoint is deleted is not stored."""
    add(payloads, [payload(1, "gone"), payload(2)])
    assert (ids(payloads, "gone"), ids(payloads)) == ([], ["r2"])


def test_parquet_is_a_dataset_of_mlflow(payloads: Payloads, tmp_path: Path) -> None:
    """The file has the columns of Databricks' inference tables, and MLflow reads it as a dataset."""
    add(payloads, [payload(1, client_request_id="c1", codes=("REQUEST_NOT_JSON",)), payload(2, sample=0.5)])
    file = tmp_path / "payloads.parquet"
    assert write_parquet(payloads.rows("a", NOW), str(file)) == 2
    frame = pd.read_parquet(file)
    assert list(frame.columns) == [
        "request_date", "databricks_request_id", "client_request_id", "request_time", "status_code",
        "sampling_fraction", "execution_duration_ms", "request", "response", "served_entity_id",
        "logging_error_codes", "requester", "model_version", "shadow",
    ]  # fmt: skip
    last = frame.iloc[1]
    assert (last["databricks_request_id"], last["client_request_id"], last["requester"]) == ("r1", "c1", "key_1")
    assert (str(last["request_date"]), last["request_time"].isoformat()) == ("2027-01-15", "2027-01-15T08:00:00+00:00")
    assert list(last["logging_error_codes"]) == ["REQUEST_NOT_JSON"]
    assert frame["sampling_fraction"].tolist() == [0.5, 1.0]
    dataset = mlflow.data.from_pandas(frame, name="payloads")
    assert (dataset.name, dataset.profile) == ("payloads", {"num_rows": 2, "num_elements": 28})


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"sample": 0}, "sample"),
        ({"sample": 1.5}, "sample"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_bytes": 10}, "max_bytes"),
        ({"max_age": 1}, "max_age"),
        ({"redact": ["("]}, r"redact\[0\]"),
        ({"redact": ["a", r"(?=b)"]}, r"redact\[1\]"),
        ({"redact": [""]}, "redact"),
        ({"keep": True}, "keep"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], field: str) -> None:
    """A setting out of its bounds, or a pattern that RE2 does not know, is refused by its name."""
    with pytest.raises(InvalidField, match=field):
        PayloadLog.read(settings)


def test_every_text_is_redacted() -> None:
    """Patterns are replaced in texts at any depth and in names, never in numbers, in linear time."""
    value = {"ada@x.org": ["call ada@x.org, or 12", {"n": 12, "ok": None}], "b": "b" * 100_000}
    found = redacted_json(value, [r"\w+@\w+\.org", r"\b12\b"])
    expected = {"[redacted]": ["call [redacted], or [redacted]", {"n": 12, "ok": None}], "b": "b" * 100_000}
    assert found == expected
    assert redacted_json(["a" * 50_000], ["(a*)*c"]) == ["a" * 50_000]
