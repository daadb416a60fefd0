"""docs/grafana.json: Grafana's own types read it, and every expression fits the figures that /metrics really shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any, get_args, get_type_hints

import promql_parser as promql
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from grafana_foundation_sdk.models.prometheus import Dataquery
from prometheus_client.parser import text_string_to_metric_families

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Store
from mlflow_llm.serving.observability.metrics import (
    COUNT_VIOLATIONS,
    OWN,
    PAYLOADS_DROPPED,
    SHADOWS_DROPPED,
    SOFT_EXCEEDED,
)

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
OLD_NAMES = {"mlflow_llm_processor_wait_ratio"}


@pytest.fixture(scope="module")
def shown(make: Callable[..., WorkerState], tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the labels of every sample of a scrape, by name."""
    tmp_path = tmp_path_factory.mktemp("shown")
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    server = make(ledger=Ledger(store, state_dir=tmp_path))
    Keys(store).create("acme", weight=3)
    client = create_app(server).test_client()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True, "stream": True}
    for model in ("assistant", "assistant:pirate"):
        assert client.post("/v1/chat/completions", json=body | {"model": model}).data
    answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 4000, "model": "assistant"}, buffered=False)
    next(answer.iter_encoded())
    answer.close()  # a disconnect
    PAYLOADS_DROPPED.labels("assistant").inc(0)  # a counter is exposed from its first request on
    SHADOWS_DROPPED.labels("assistant", "candidate").inc(0)
    SOFT_EXCEEDED.labels("assistant", "tenant", "otpm").inc(0)
    COUNT_VIOLATIONS.labels("billed").inc(0)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    store.close()
    return found


def filled(expression: str) -> str:
    """Return ``expression`` with values for the dashboard's variables."""
    text = expression.replace("$__rate_interval", "1m")
    for name in VARIABLES:
        text = text.replace(f"${name}", ".*")
    assert "$" not in text
    return text


def selectors(node: Any) -> Iterator[Any]:
    """Yield every vector selector below ``node``."""
    if isinstance(node, promql.VectorSelector):
        yield node
    elif isinstance(node, promql.MatrixSelector):
        yield node.vector_selector
    else:
        for name in ("expr", "lhs", "rhs", "param"):
            if getattr(node, name, None) is not None:
                yield from selectors(getattr(node, name))
        for argument in getattr(node, "args", ()):
            yield from selectors(argument)


def groupings(node: Any) -> Iterator[tuple[set[str], Any]]:
    """Yield the labels of every ``by (…)`` below ``node`` with the grouped expression."""
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        yield set(node.modifier.labels), node.expr
    for name in ("expr", "lhs", "rhs"):
        if getattr(node, name, None) is not None:
            yield from groupings(getattr(node, name))
    for argument in getattr(node, "args", ()):
        yield from groupings(argument)


@pytest.fixture
def dashboard() -> Any:
    """Return the dashboard as objects of Grafana's schema."""
    register_default_plugins()
    return Dashboard.from_json(DASHBOARD)


def unlike(given: Any, got: Any, path: str = "") -> Iterator[str]:
    """Yield each path where ``got`` lacks or changes something of ``given``; additions in ``got`` are defaults."""
    if isinstance(given, dict) and isinstance(got, dict):
        for name, value in given.items():
            yield from unlike(value, got[name], f"{path}/{name}") if name in got else [f"{path}/{name} is unknown"]
    elif isinstance(given, list) and isinstance(got, list) and len(given) == len(got):
        for place, (one, other) in enumerate(zip(given, got, strict=True)):
            yield from unlike(one, other, f"{path}/{place}")
    elif given != got:
        yield f"{path}: {got!r} instead of {given!r}"


def not_allowed(value: Any, path: str = "") -> Iterator[str]:
    """Yield each path where an object of the schema has a value outside the field's enumeration."""
    if isinstance(value, (list, dict)):
        for name, item in enumerate(value) if isinstance(value, list) else value.items():
            yield from not_allowed(item, f"{path}/{name}")
    elif hasattr(value, "to_json") and not isinstance(value, Enum):
        hints = get_type_hints(type(value))
        for name, item in vars(value).items():
            kinds = [kind for kind in (hints[name], *get_args(hints[name])) if isinstance(kind, type)]
            allowed = [member.value for kind in kinds if issubclass(kind, Enum) for member in kind]
            if allowed and item is not None and item not in allowed:
                yield f"{path}/{name}: {item!r} is none of {allowed}"
            yield from not_allowed(item, f"{path}/{name}")


def test_grafana_reads_all_of_it(dashboard: Any) -> None:
    """Grafana's schema knows every field, and writes each as it was."""
    assert list(unlike(DASHBOARD, json.loads(JSONEncoder().encode(dashboard)))) == []


def test_grafana_knows_every_value(dashboard: Any) -> None:
    """Every value of an enumeration is one of its members."""
    assert list(not_allowed(dashboard)) == []
    dashboard.panels[-1].options.tooltip.mode = "several"
    assert [found.split(":")[0] for found in not_allowed(dashboard)] == [
        f"/panels/{len(PANELS) - 1}/options/tooltip/mode"
    ]


def test_grafana_knows_every_panel(dashboard: Any) -> None:
    """Panels, their options and their queries are of types that Grafana has: none is kept as an unread bag."""
    for panel in dashboard.panels:
        assert type(panel.options).__module__ == f"grafana_foundation_sdk.models.{panel.type_val}"
        assert {type(target) for target in panel.targets} == {Dataquery}


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_expressions_fit_the_exposed_metrics(title: str, expression: str, shown: dict[str, set[str]]) -> None:
    """Expressions are valid PromQL over exposed metrics and labels, and legends name such labels."""
    parsed = promql.parse(filled(expression))
    used = list(selectors(parsed))
    assert used
    for selector in used:
        assert selector.name in shown, f"{title}: /metrics has no {selector.name}"
        assert {matcher.name for matcher in selector.matchers.matchers} <= shown[selector.name]
    for labels, grouped in groupings(parsed):
        for selector in selectors(grouped):
            assert labels <= shown[selector.name]
    (target,) = [t for p in PANELS if p["title"] == title for t in p["targets"] if t["expr"] == expression]
    named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert named <= set().union(*(shown[selector.name] for selector in used))


def test_every_metric_is_on_the_dashboard(shown: dict[str, set[str]]) -> None:
    """Every exported metric is shown on the dashboard, except by an old name."""
    used = {s.name for _, expression in EXPRESSIONS for s in selectors(promql.parse(filled(expression)))}
    bases = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in shown} - OLD_NAMES
    assert {metric.name for metric in OWN.collect()} <= bases, (
        "give each a value in the fixture: it has none until then"
    )
    assert bases <= {re.sub(r"_(bucket|total)$", "", name) for name in used}


@pytest.mark.parametrize("name", ["endpoint", "adapter"])
def test_variables_have_values_from_a_metric(name: str, shown: dict[str, set[str]]) -> None:
    """A variable's values come from a metric that has the label."""
    query = VARIABLES[name]["query"]["query"]
    metric, label = re.fullmatch(r"label_values\((\w+)(?:{.*})?, (\w+)\)", query).groups()
    assert label == name
    assert label in shown[metric]


def test_the_dashboard_can_be_loaded() -> None:
    """Grafana can load the dashboard: it has unique ids, panels that do not overlap, data sources and reference ids."""
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert VARIABLES["datasource"]["type"] == "datasource"
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        apart = [one[a] + one[s] <= other[a] or other[a] + other[s] <= one[a] for a, s in (("x", "w"), ("y", "h"))]
        assert any(apart)
