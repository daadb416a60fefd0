"""Pairs of answers from an endpoint's payload log: of the entity that answered, and of a shadow that got a copy."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import click

from ...http.management.paths import PAYLOADS
from ...system.escape import visible_line
from ..http import Client
from .pairs import Outcome, Pair, output_of

PAGE_ROWS = 200


def logged_pairs(client: Client, endpoint: str, current: str, candidate: str) -> list[Pair]:
    """Return the requests that both versions (``assistant/3``) answered, the newest first. Raises ``ClickException``
    for an endpoint without any."""
    answers: dict[str, dict[str, Any]] = {}
    copies: dict[str, dict[str, Any]] = {}
    path = f"{PAYLOADS.replace('<name>', quote(endpoint, safe=''))}?limit={PAGE_ROWS}"
    cursor = ""
    with client.understood():
        while True:
            page = client.get(path + (f"&cursor={cursor}" if cursor else ""))
            for row in page["payloads"]:
                wanted, found = (candidate, copies) if row["shadow"] else (current, answers)
                if row["model_version"] == wanted:
                    found[row["request_id"]] = row
            if (cursor := page["next_cursor"]) is None:
                break
        both = [(answers[name], copies[name]) for name in answers if name in copies]
        pairs = [_pair(answer, copy) for answer, copy in both if answer["request"] is not None]
    if not pairs:
        shown = visible_line(endpoint)
        raise click.ClickException(
            f"the payload log of {shown} has no request that {current} answered and of which {candidate} got a copy: "
            f"mlflow-llm endpoints update {shown} --shadow {candidate} --payload-log on"
        )
    return pairs


def _pair(answer: dict[str, Any], copy: dict[str, Any]) -> Pair:
    inputs = json.loads(answer["request"])
    if not isinstance(inputs, dict):
        inputs = {"request": inputs}
    return Pair(name=answer["request_id"], inputs=inputs, current=_outcome(answer), candidate=_outcome(copy))


def _outcome(row: dict[str, Any]) -> Outcome:
    """Return the outcome of a row; one that failed after a part of its answer has failed."""
    status, response = row["status_code"], row["response"]
    if status >= 400:
        return Outcome(status=status, error="the log has no more of it")
    return Outcome(status=status, output=None if response is None else output_of(json.loads(response)))
