"""A scrape of a server, by name and labels."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from serving_process import Running

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def figures(server: Running) -> Figures:
    """Return every sample of a scrape by name and labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=240) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def pick(found: Figures, name: str, **labels: str) -> float:
    """Return the sum of the samples of ``name`` that have ``labels``."""
    return sum(value for (n, has), value in found.items() if n == name and labels.items() <= dict(has).items())
