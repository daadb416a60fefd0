"""Labels and model versions in the ledger: shown, selected by, summed by; and rows that have none."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.metering import Price, ProvisionedMinutes, Store, Usage, UsageFilter, migrations
from mlflow_llm.serving.metering.ledger.retention import fold
from mlflow_llm.serving.metering.store.tables import ledger as table
from mlflow_llm.serving.metering.usage.export import csv_lines, write_parquet
from mlflow_llm.serving.metering.usage.filter import filter_of, groups_of
from mlflow_llm.serving.metering.usage.usage import bill
from mlflow_llm.serving.model_files.model_version import ModelVersion

OLD, NEW = (ModelVersion(name="assistant", version=v, content_hash=v * 64) for v in "78")
LABELS = (
    Labels(),
    Labels(user="ada", client_request_id="c1", tags={"team": "search", "a b": "é'\n"}),
    Labels(user="ada", tags={"team": "ads"}),
    Labels(user="=bob", tags={"team": "search"}),
)


@pytest.fixture
def filled(ledger, reserve_of):
    """Record a request for each of ``LABELS``, the first of them as one from before there were any."""
    ledger.prices.set("*", Price(output=1_000_000))
    for number, labels in enumerate(LABELS):
        model = OLD if number < 3 else NEW
        given = {"model": model, "labels": labels} if number else {}
        ledger.reserve(reserve_of(f"r{number}", **given)).settle(completion=number)
    return ledger


def ids(store, **asked):
    return [row.request_id for row in Usage(store).rows(filter_of(asked))]


def test_rows_show_labels_and_versions(store, filled):
    """Rows show labels and versions as they were given; a row of an earlier release has none."""
    none, first, *_ = Usage(store).rows(UsageFilter())
    assert (none.model_version, none.content_hash, none.end_user, none.client_request_id, none.tags) == (None,) * 5
    assert (first.model_version, first.content_hash) == ("assistant/7", "7" * 64)
    assert (first.end_user, first.client_request_id, first.tags) == ("ada", "c1", LABELS[1].tags)


def test_rows_are_selected_by_labels(store, filled):
    """Rows are selected by each label alone and together with the other filters."""
    assert ids(store, end_user="ada") == ["r1", "r2"]
    assert ids(store, client_request_id="c1") == ids(store, tag="a b=é'\n") == ["r1"]
    assert ids(store, tag="team=search") == ["r1", "r3"]
    assert ids(store, tag="team=search", end_user="ada") == ["r1"]
    assert ids(store, model_version="assistant/8") == ids(store, content_hash="8" * 64) == ["r3"]
    assert ids(store, tag="team=nobody") == ids(store, tag="nothing=x") == []


def test_usage_is_summed_by_labels(store, filled):
    """Usage is summed by a label; rows without it are summed under an empty one."""
    sums = {total.group: total.completion_tokens for total in Usage(store).sums(UsageFilter(), groups_of("tags.team"))}
    assert sums == {("",): 0, ("ads",): 2, ("search",): 4}
    by = groups_of("end_user,model_version")
    sums = {total.group: total.requests for total in Usage(store).sums(UsageFilter(), by)}
    assert sums == {("", ""): 1, ("=bob", "assistant/8"): 1, ("ada", "assistant/7"): 2}
    (row,) = bill(Usage(store), filter_of({"tag": "team=ads"}), ("tags.team",))["usage"]
    assert (row["tags.team"], row["requests"]) == ("ads", 1)


def test_folded_days_have_no_labels(store, filled, clock):
    """Their totals stay, under an empty label; no filter by a label finds them."""
    clock.now += 40 * 86_400
    assert fold(store, 32, clock=clock) == 4
    (total,) = Usage(store).sums(UsageFilter(), ("end_user", "tags.team", "model_version"))
    assert (total.group, total.requests, total.completion_tokens) == (("", "", ""), 4, 6)
    assert Usage(store).sums(filter_of({"end_user": "ada"}), ("day",)) == ()


def test_reserved_time_belongs_to_no_label(store, filled, clock):
    """A bill by a label has no reserved throughput, which a tenant pays."""
    ProvisionedMinutes(store, clock=clock).record(tenant="acme", endpoint="chat", entity="model-1", units=5)
    assert bill(Usage(store), UsageFilter(), ("tenant",))["provisioned"]
    assert bill(Usage(store), filter_of({"end_user": "ada"}), ("tenant",))["provisioned"] == []


@pytest.mark.parametrize("tag", ["team", "=x", 'a"b=x', "a\\b=x", "a\nb=x", "t" * 65 + "=x", "a=" + "x" * 513, "a=\0"])
def test_tags_that_no_row_can_be_selected_by_are_refused(tag):
    """A filter needs a name and a value; a name with quotation marks is no path in a database."""
    with pytest.raises(InvalidField, match="NAME=VALUE"):
        filter_of({"tag": tag})


@pytest.mark.parametrize("by", ["tags.", 'tags.a"b', "tags", "team", "end_user,end_user"])
def test_groups_that_are_none_are_refused(by):
    """The error lists the columns, with the form of a tag."""
    with pytest.raises(InvalidField, match=r"tags\.NAME"):
        groups_of(by)


def test_exports_have_labels(store, filled, tmp_path):
    """CSV and Parquet have tags as one JSON object; a user that a spreadsheet would run is disarmed in the CSV."""
    usage = Usage(store)
    rows = list(csv.DictReader(io.StringIO("".join(csv_lines(usage, UsageFilter())))))
    assert (rows[0]["tags"], json.loads(rows[1]["tags"]), rows[3]["end_user"]) == ("", LABELS[1].tags, "'=bob")
    path = str(tmp_path / "usage.parquet")
    write_parquet(usage, UsageFilter(), path)
    found = pq.read_table(path).to_pylist()
    assert (found[0]["tags"], json.loads(found[1]["tags"]), found[3]["model_version"]) == (
        None,
        LABELS[1].tags,
        "assistant/8",
    )


def test_a_row_without_labels_has_no_tags_at_all(store, filled):
    """NULL, and not JSON's null, so that queries of one's own can tell."""
    query = sa.select(sa.func.count()).select_from(table).where(table.c.tags.is_(sa.null()))
    assert store.read(lambda connection: connection.execute(query).scalar_one()) == 1


def test_rows_of_the_release_before_stay_readable(store_url, store, filled):
    """A database without these columns is upgraded when it is opened; its rows have no labels, and the same sums."""
    before = Usage(store).sums(UsageFilter(), ("tenant",))
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))

    def to_the_release_before(connection):
        config.attributes["connection"] = connection
        command.downgrade(config, "0009")

    store.write(to_the_release_before)
    again = Store(store_url)
    try:
        assert Usage(again).sums(UsageFilter(), ("tenant",)) == before
        assert {row.tags for row in Usage(again).rows(UsageFilter())} == {None}
    finally:
        again.close()
