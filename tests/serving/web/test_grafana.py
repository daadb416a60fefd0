"""docs/grafana.json: its shape, and every expression against the figures that /metrics really shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlflow_llm.serving.web.app import create_app
from mlflow_llm.serving.web.invoke import Server

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.fixture
def shown(make: Callable[..., Server]) -> dict[str, set[str]]:
    """The labels of every sample that a scrape shows, by name."""
    client = create_app(make()).test_client()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True, "stream": True}
    for model in ("assistant", "assistant:pirate"):
        assert client.post("/v1/chat/completions", json=body | {"model": model}).data
    answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 4000, "model": "assistant"}, buffered=False)
    next(answer.iter_encoded())
    answer.close()  # a disconnect
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def filled(expression: str) -> str:
    """``expression`` with the dashboard's variables in place."""
    text = expression.replace("$__rate_interval", "1m")
    for name in VARIABLES:
        text = text.replace(f"${name}", ".*")
    assert "$" not in text
    return text


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector below ``node``."""
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
    """The labels of every ``by (…)`` below ``node``, and what they group."""
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        yield set(node.modifier.labels), node.expr
    for name in ("expr", "lhs", "rhs"):
        if getattr(node, name, None) is not None:
            yield from groupings(getattr(node, name))
    for argument in getattr(node, "args", ()):
        yield from groupings(argument)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_expression(title: str, expression: str, shown: dict[str, set[str]]) -> None:
    """It is PromQL; its metrics are exposed with the labels it selects and groups by; legends name such labels."""
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
    """What is measured is shown."""
    used = {s.name for _, expression in EXPRESSIONS for s in selectors(promql.parse(filled(expression)))}
    bases = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in shown}
    assert bases <= {re.sub(r"_(bucket|total)$", "", name) for name in used}


@pytest.mark.parametrize("name", ["endpoint", "adapter"])
def test_variables(name: str, shown: dict[str, set[str]]) -> None:
    """A variable's values come from a metric that has the label."""
    query = VARIABLES[name]["query"]["query"]
    metric, label = re.fullmatch(r"label_values\((\w+)(?:{.*})?, (\w+)\)", query).groups()
    assert label == name
    assert label in shown[metric]


def test_shape() -> None:
    """What Grafana needs to load it: ids, places that fit and do not overlap, data sources and reference ids."""
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
