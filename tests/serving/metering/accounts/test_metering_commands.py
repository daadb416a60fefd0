"""Keys, limits, prices and the bill from the command line."""

from __future__ import annotations

import csv
import io
import json

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.interface.errors import Conflict, InvalidField, NotFound, RequestError
from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.metering import Keys, Limits, Price, Prices, ProvisionedMinutes
from mlflow_llm.serving.metering.ledger.retention import fold


@pytest.fixture
def run(sqlite_url):
    def call(*words):
        done = CliRunner().invoke(cli, list(words), env={"MLFLOW_LLM_DATABASE": sqlite_url})
        if isinstance(done.exception, RequestError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    return call


@pytest.fixture
def store_url(sqlite_url):
    return sqlite_url


def test_keys_with_limits(run, store):
    """A key is made with its limits, for its tenant and scopes."""
    secret = run("keys", "create", "--tenant", "acme", "--limit", "otpm=500", "--limit", "budget_month=2.50").strip()
    caller = Keys(store).verify(secret)
    assert caller.tenant == "acme"
    found = {(limit.scope, limit.subject, limit.kind): limit.value for limit in Limits(store).list()}
    assert found == {("key", caller.key_id, "otpm"): 500, ("key", caller.key_id, "budget_month"): 2_500_000}
    heads, line = run("keys", "list").splitlines()
    shown = ["key", "prefix", "tenant", "scopes", "endpoints", "created", "expires", "state", "weight", "name"]
    assert heads.split() == shown
    assert line.split()[:5] == [caller.key_id, secret[:10] + "…", "acme", "invoke", "all"]


def test_keys_with_weights(run, store):
    """A weight is set when a key is made or changed, shown in lists and metrics, and kept within its range."""
    secret = run("keys", "create", "--tenant", "acme", "--weight", "3").strip()
    keys = Keys(store)
    caller = keys.verify(secret)
    assert (caller.weight, keys.weights()) == (3, {caller.key_id: 3})
    run("keys", "update", caller.key_id, "--weight", "1000")
    assert Keys(store).verify(secret).weight == 1000
    assert run("keys", "list").splitlines()[1].split()[-1] == "1000"
    for bad in (0, 1001, True, 1.5, "2"):
        with pytest.raises(InvalidField, match="weight"):
            keys.update(caller.key_id, weight=bad)
    keys.revoke(caller.key_id)
    assert keys.weights() == {}


def test_limits(run, store):
    """Limits are set, listed and removed, with money in currency units."""
    assert "tenant acme: 0.25 currency units in all" in run("limits", "set", "tenant", "acme", "qph=7", "budget=0.25")
    assert [(limit.kind, limit.value) for limit in Limits(store).list()] == [("budget", 250_000), ("qph", 7)]
    line = run("limits", "list", "--scope", "tenant").splitlines()[1].split()
    assert line == ["tenant", "acme", "budget", "0.25", "currency", "units", "in", "all"]
    run("limits", "remove", "tenant", "acme", "qph", "budget")
    assert Limits(store).list() == ()
    with pytest.raises(NotFound):
        run("limits", "remove", "tenant", "acme", "qph")


def test_soft_limits(run, store):
    """A soft limit and its alerts are set, shown and taken back."""
    told = run("limits", "set", "tenant", "acme", "budget=5", "--soft", "--alert-at", "0.8,0.5")
    assert told.splitlines()[0] == "tenant acme: 5.00 currency units in all, soft, alerts at 0.5, 0.8"
    (limit,) = Limits(store).list()
    assert (limit.soft, limit.alert_at) == (True, (0.5, 0.8))
    assert run("limits", "list").splitlines()[1].split()[-3:] == ["yes", "0.5,", "0.8"]
    run("limits", "set", "tenant", "acme", "budget=5")
    (limit,) = Limits(store).list()
    assert (limit.soft, limit.alert_at) == (False, None)


def test_limits_of_unknown_subjects(run, store, sqlite_url):
    """A limit for an unknown key is refused; one for an unknown endpoint is set with a note."""
    with pytest.raises(NotFound, match="no key 'key_nope'"):
        run("limits", "set", "key", "key_nope", "otpm=1")
    assert Limits(store).list() == ()
    _, key = Keys(store).create("acme")
    for scope, subject, noted in (("key", key.key_id, False), ("key", "anonymous", False), ("user", "chat", True)):
        words = ["limits", "set", scope, subject, "otpm=1", "--database", sqlite_url]
        done = CliRunner().invoke(cli, words)
        assert (done.exit_code, "note: there is no endpoint 'chat' yet" in done.stderr) == (0, noted)
    assert len(Limits(store).list()) == 3


def test_a_price_is_given(store, sqlite_url):
    """A price must be given to be set; 0 is allowed."""
    done = CliRunner().invoke(cli, ["prices", "set", "m", "--database", sqlite_url])
    assert (done.exit_code, "give a price" in done.stderr) == (2, True)
    assert Prices(store).list() == ()
    done = CliRunner().invoke(cli, ["prices", "set", "m", "--input", "0", "--database", sqlite_url])
    assert done.stdout == "m: 0.00 in, 0.00 cached, 0.00 out\n"


def test_a_price_for_an_unserved_model_is_warned_of(store, sqlite_url):
    """A price for a model that is not served is set with a warning; a price for all models has none."""
    done = CliRunner().invoke(cli, ["prices", "set", "typo", "--input", "1", "--database", sqlite_url])
    assert (done.exit_code, done.stderr) == (
        0,
        "note: no endpoint serves 'typo', so nothing costs this yet; served is nothing\n",
    )
    assert CliRunner().invoke(cli, ["prices", "set", "*", "--input", "1", "--database", sqlite_url]).stderr == ""


def test_money_has_its_currency(run, store, ledger, reserve_of):
    """Prices, limits, refusals and bills show the currency, which cannot be changed once costs are booked."""
    assert run("prices", "currency") == "no currency is set\n"
    assert run("prices", "currency", "EUR") == "EUR\n"
    assert run("prices", "set", "*", "--input", "1000").startswith("*: 1000.00 EUR in")
    assert run("prices", "list").splitlines()[0] == "in EUR"
    assert run("limits", "set", "tenant", "acme", "budget=0.015") == "tenant acme: 0.015 EUR in all\n"
    ledger.reserve(reserve_of("r0")).settle(completion=0)
    with pytest.raises(RequestError, match=r"limit is 0\.015 EUR in all; 0\.005 are left and this request needs 0\.01"):
        ledger.reserve(reserve_of("r1"))
    lines = run("usage", "--by", "tenant").splitlines()
    assert (lines[0].split()[-2:], lines[1].split()[-1]) == (["cost", "EUR"], "0.01")
    with pytest.raises(Conflict, match="booked in EUR"):
        run("prices", "currency", "USD")
    assert run("prices", "remove", "*") == "*: removed all prices\n"


@pytest.mark.parametrize("where", ["folded", "provisioned"])
def test_a_currency_stays_with_its_costs(run, store, ledger, reserve_of, clock, where):
    """The currency is fixed by costs that are folded into daily sums, or of reserved throughput, too."""
    run("prices", "currency", "EUR")
    ledger.prices.set("model-1", Price(input=1_000_000, unit_minute=1_000_000))
    if where == "folded":
        ledger.reserve(reserve_of("r0")).settle(completion=0)
        assert fold(store, 32, clock=lambda: clock() + 100 * 86_400) == 1
    else:
        ProvisionedMinutes(store, prices=ledger.prices, clock=clock).record(
            tenant="t", endpoint="chat", entity="model-1", units=1
        )
    with pytest.raises(Conflict, match="booked in EUR"):
        run("prices", "currency", "USD")
    assert run("prices", "currency") == "EUR\n"


def test_a_past_time_is_shown_as_one(run):
    """A time in the past is shown as a date rather than as seconds since 1970."""
    with pytest.raises(InvalidField, match=r"effective: '2020-01-01T00:00:00\+00:00' is not allowed"):
        run("prices", "set", "m", "--input", "1", "--effective", "2020-01-01")


def test_prices(run, store):
    """A price is for a million tokens in currency units; cached tokens cost the same unless given."""
    run("prices", "set", "model-1", "--input", "3", "--output", "15.000001")
    ((entity, _, price),) = Prices(store).list()
    assert (entity, price.input, price.cached, price.output) == ("model-1", 3_000_000, 3_000_000, 15_000_001)
    assert run("prices", "list").splitlines()[1].split()[-4:] == ["3.00", "3.00", "15.000001", "0.00"]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("limits", "set", "tenant", "a", "speed=3"), "limit"),
        (("limits", "set", "tenant", "a", "qph"), "limit"),
        (("limits", "set", "tenant", "a", "qph=-1"), "qph"),
        (("limits", "set", "tenant", "a", "qph=1.5"), "qph"),
        (("limits", "set", "tenant", "a", "budget=many"), "budget"),
        (("limits", "set", "tenant", "a", "budget=0.0000001"), "budget"),
        (("limits", "set", "tenant", "a", "budget=NaN"), "budget"),
        (("limits", "set", "tenant", "", "qph=1"), "subject"),
        (("keys", "create", "--limit", "x=1"), "limit"),
        (("keys", "create", "--tenant", "shadow"), "tenant"),
        (("keys", "create", "--tenant", ""), "tenant"),
        (("prices", "set", "m", "--input", "-1"), "input"),
        (("prices", "set", "m", "--input", "1", "--cached", "2"), "cached"),
        (("usage", "--start", "soon"), "start"),
        (("usage", "--by", "week"), "by"),
        (("usage", "fold", "3"), "days"),
    ],
)
def test_mistakes_are_named(run, store, words, field):
    """An error names the field, its value and what is allowed, and nothing is changed."""
    with pytest.raises(InvalidField, match=f"^{field}: ") as refused:
        run(*words)
    assert refused.value.param == field


def test_a_database_that_cannot_be(tmp_path):
    """An unusable database is a one-line error without a traceback."""
    for url in (
        "nodialect://x",
        "sqlite://",
        "store.db",
        f"sqlite:///{tmp_path}/no\0name",
        f"sqlite:///{tmp_path}/no/x",
    ):
        done = CliRunner().invoke(cli, ["keys", "create", "--database", url])
        assert done.exit_code == 1
        assert done.stderr.startswith(f"Error: database {url}: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("keys", "list"),
        ("keys", "revoke", "key_1"),
        ("limits", "list"),
        ("limits", "remove", "tenant", "acme", "qph"),
        ("prices", "list"),
        ("usage",),
        ("usage", "fold", "40"),
    ],
)
def test_reading_makes_no_store(words, sqlite_url, tmp_path):
    """A command that reads refuses a missing database instead of creating one."""
    done = CliRunner().invoke(cli, list(words), env={"MLFLOW_LLM_DATABASE": sqlite_url})
    assert (done.exit_code, "there is no such file" in done.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_the_bill(run, store, ledger, reserve_of, tmp_path):
    """The bill has sums with a total, reserved throughput and the export files."""
    run("prices", "set", "*", "--input", "1", "--output", "2", "--unit-minute", "0.5")
    for number in range(3):
        ledger.reserve(reserve_of(f"r{number}", tenant=f"t{number % 2}")).settle(completion=number)
    ProvisionedMinutes(store, clock=lambda: ledger.now_ms() / 1000).record(
        tenant="t0", endpoint="chat", entity="m", units=4
    )
    files = {kind: tmp_path / f"usage.{kind}" for kind in ("csv", "parquet", "png")}
    options = ("--csv", str(files["csv"]), "--parquet", str(files["parquet"]), "--plot", str(files["png"]))
    lines = run("usage", "--by", "tenant", *options).splitlines()
    assert lines[0].split() == ["tenant", "requests", "prompt", "cached", "completion", "cost"]
    assert lines[1].split() == ["t0", "2", "20", "0", "2", "0.000024"]
    assert lines[3].split() == ["total", "3", "30", "0", "3", "0.000036"]
    assert lines[4] == "reserved by t0 on chat, m: 4 token/s × minutes, 2.00"
    assert lines[5:] == ["total with reserved throughput: 2.000036"]
    assert [row["request_id"] for row in csv.DictReader(io.StringIO(files["csv"].read_text()))] == ["r0", "r1", "r2"]
    assert pq.read_table(str(files["parquet"])).num_rows == 3
    assert files["png"].stat().st_size > 1000
    printed = json.loads(run("usage", "--by", "tenant", "--tenant", "t0", "--json"))
    assert printed["usage"][0]["completion_tokens"] == 2
    assert printed["provisioned"] == [
        {"tenant": "t0", "endpoint": "chat", "entity": "m", "unit_minutes": 4, "cost": "2.00"}
    ]
    assert run("usage", "--end", "2020-01-01", "--by", "day").splitlines()[1].split()[:2] == ["total", "0"]
    assert run("usage", "fold", "32") == "folded 0 requests\n"


def test_settle(run, ledger, reserve_of, tmp_path):
    """``usage settle`` closes a killed process's requests with the tokens counted, without a server."""
    from ledger_rows import bury, rows_of

    lease = ledger.reserve(reserve_of("r1"))
    lease.count(4)
    ledger.state_dir.parent.rename(tmp_path / "ledger")
    words = ("usage", "settle", "--state", str(tmp_path))
    assert run(*words) == "settled 0 requests; 1 are open in running processes\n"
    bury(ledger)
    assert run(*words) == "settled 1 requests; 0 are open in running processes\n"
    assert rows_of(ledger.store)["r1"].completion_tokens == 4


def test_the_bill_by_labels(run, ledger, reserve_of):
    """Sums by tags and users, and of one of them; a tag without a value is refused by the option's name."""
    for number, team in enumerate(("search", "search", "ads")):
        labels = Labels(user=f"u{number}", tags={"team": team})
        ledger.reserve(reserve_of(f"r{number}", labels=labels)).settle(completion=number)
    lines = [line.split()[:2] for line in run("usage", "--group-by", "tags.team").splitlines()[1:]]
    assert lines == [["ads", "1"], ["search", "2"], ["total", "3"]]
    lines = run("usage", "--by", "end_user", "--tag", "team=search", "--end-user", "u1").splitlines()
    assert lines[1].split()[:2] == ["u1", "1"]
    with pytest.raises(InvalidField, match="NAME=VALUE"):
        run("usage", "--tag", "team")
