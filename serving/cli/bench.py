"""``mlflow-llm bench``: load on a URL, and what it gave."""

from __future__ import annotations

import json
from typing import Any

import click

from .http import Client, url_options
from .load import run

COLUMNS = (
    ("callers", "concurrency"),
    ("requests", "requests"),
    ("errors", "errors"),
    ("tokens/s", "tokens_per_second"),
    ("TTFT p50", "ttft_p50_ms"),
    ("p90", "ttft_p90_ms"),
    ("p99", "ttft_p99_ms"),
    ("TPOT p50", "tpot_p50_ms"),
    ("p90", "tpot_p90_ms"),
    ("p99", "tpot_p99_ms"),
    ("e2e p50", "e2e_p50_ms"),
    ("p99", "e2e_p99_ms"),
)


@click.command()
@url_options
@click.option("--model", help="endpoint or endpoint:adapter (default: the server's first).")
@click.option("--concurrency", default="1,8,32", show_default=True, help="Numbers of callers, in turn.")
@click.option("--requests", default=4, show_default=True, type=click.IntRange(1), help="Requests of each caller.")
@click.option("--prompt-words", default=80, show_default=True, type=click.IntRange(1))
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_file", type=click.Path(dir_okay=False, writable=True), help="Write the figures here.")
def bench(
    url: str,
    key: str | None,
    model: str | None,
    concurrency: str,
    requests: int,
    prompt_words: int,
    max_tokens: int,
    json_file: str | None,
) -> None:
    """Measure a server: time to first token, time per output token, throughput (times in milliseconds)."""
    client = Client(url, key)
    body: dict[str, Any] = {
        "model": model or client.get("/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": " ".join(["word"] * prompt_words)}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    run(client, {**body, "max_tokens": 2}, 1, 1)
    rows = []
    click.echo("  ".join(f"{title:>9}" for title, _ in COLUMNS))
    for callers in _numbers(concurrency):
        result = run(client, body, callers, callers * requests)
        rows.append(result.summary())
        click.echo("  ".join(f"{rows[-1][column]!s:>9}" for _, column in COLUMNS))
        if result.errors:
            click.echo(f"first error: {result.errors[0]}", err=True)
    if json_file is not None:
        with open(json_file, "w", encoding="utf-8") as file:
            json.dump({"url": url, "body": body, "results": rows}, file, indent=2)
    if any(row["errors"] for row in rows):
        raise SystemExit(1)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise click.BadParameter("expected numbers of callers such as 1,8,32", param_hint="--concurrency")
    return found
