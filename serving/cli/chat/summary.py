"""``/show``: the settings of a conversation and where each comes from, and its tokens, speed and cost so far."""

from __future__ import annotations

import json
import time
from urllib.parse import urlencode

import click

from ...http.management.paths import USAGE
from ...system.escape import visible, visible_line
from ..http import Client
from .conversation import Conversation

PAGE_ROWS = 1000
MAX_PAGES = 20
SETTLED_SECONDS, POLL_SECONDS = 2.0, 0.1  # a reply is settled soon after its last byte


def summary(talk: Conversation) -> str:
    """Return lines of a name and its value each."""
    rows = [*_settings(talk), *_counts(talk), ("cost", cost(talk))]
    width = max(len(name) for name, _ in rows)
    return visible("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows))


def _settings(talk: Conversation) -> list[tuple[str, str]]:
    own, here = talk.own(), talk.defaults()
    rows = [("model", visible_line(talk.model))]
    if talk.system:
        rows.append(("system", visible_line(talk.system)))
    for name, value in (own | here | talk.fields).items():
        if name == "model":
            continue
        if name in talk.fields:
            source = "" if value is not None else "  (the server's own)"
        else:
            source = "  (the default in the terminal)" if name in here else "  (the model's own)"
        rows.append((name, f"{visible_line(json.dumps(value, ensure_ascii=False))}{source}"))
    return rows


def _counts(talk: Conversation) -> list[tuple[str, str]]:
    rows = [("turns", str(len(talk.turns)))]
    if talk.log_id:
        rows.append(("recorded as", talk.log_id))
    used = [asked.usage for asked in talk.asked if asked.usage is not None]
    prompt, new = (sum(usage[name] for usage in used) for name in ("prompt_tokens", "completion_tokens"))
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in used)
    rows.append(("tokens", f"{prompt} prompt ({cached} cached), {new} new"))
    if talk.asked and (pace := talk.asked[-1].tokens_per_second) is not None:
        first = talk.asked[-1].first or 0.0
        rows.append(("last reply", f"{pace:.1f} tokens/s, first after {first * 1e3:.0f} ms"))
    return rows


def cost(talk: Conversation) -> str:
    """Return what the conversation's replies cost, as far as the key may ask for it."""
    if not isinstance(talk.server, Client):
        return "none: the model runs here, without prices"
    # the ledger's id is the reply's without what it begins with in OpenAI's form
    wanted = {asked.request_id.removeprefix("chatcmpl-") for asked in talk.asked if asked.request_id}
    if not wanted or talk.created is None:
        return "nothing yet"
    try:
        until = time.monotonic() + SETTLED_SECONDS
        while True:
            told, missing = _of_requests(talk.server, wanted, talk.created)
            if not missing or time.monotonic() >= until:
                return told
            time.sleep(POLL_SECONDS)
    except click.ClickException as error:
        return f"not known: {error.message}"


def _of_requests(client: Client, wanted: set[str], since: int) -> tuple[str, int]:
    """Return the cost of requests, found among those since a time, in Unix seconds, and how many are not settled."""
    from ...metering.accounts.money import micro_units_of, money  # with SQLAlchemy, which a chat need not wait for

    found: dict[str, int] = {}
    asked: dict[str, object] = {"start": max(0, since - 1) * 1000, "limit": PAGE_ROWS}
    for _ in range(MAX_PAGES):
        with client.understood():
            page = client.get(f"{USAGE}?{urlencode(asked)}")
            found |= {
                row["request_id"]: micro_units_of(row["cost"])
                for row in page["usage"]
                if row["request_id"] in wanted and row["status"] != "open"
            }
            currency, cursor = page["currency"], page["next_cursor"]
        if cursor is None or len(found) == len(wanted):
            break
        asked["cursor"] = cursor
    total = money(sum(found.values()), currency)
    missing = len(wanted) - len(found)
    more = f" for {len(found)} of {len(wanted)} replies; the others are not settled yet" if missing else ""
    return total + more, missing
