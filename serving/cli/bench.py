"""``mlflow-llm bench``: latency and throughput of a server under load."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import click

from .http import Client, first_model, url_options
from .load_generator import Body, Result, Sample, closed_loop, prompt, streamed, whole

COLUMNS = (
    ("callers", "concurrency", 7),
    ("requests", "requests", 8),
    ("errors", "errors", 6),
    ("tokens/s", "tokens_per_second", 9),
    ("req/s", "requests_per_second", 7),
    ("TTFT p50", "ttft_p50_ms", 9),
    ("p90", "ttft_p90_ms", 8),
    ("p99", "ttft_p99_ms", 8),
    ("TPOT p50", "tpot_p50_ms", 9),
    ("p90", "tpot_p90_ms", 8),
    ("p99", "tpot_p99_ms", 8),
    ("e2e p50", "e2e_p50_ms", 9),
    ("p90", "e2e_p90_ms", 9),
    ("p99", "e2e_p99_ms", 9),
)


@click.command()
@url_options
@click.option("--model", help="Endpoint or endpoint:adapter (default: the server's first).")
@click.option(
    "--concurrency", default="1,8,32", show_default=True, help="Numbers of concurrent callers, in this order."
)
@click.option("--requests", default=4, show_default=True, type=click.IntRange(1), help="Requests per caller.")
@click.option("--prompt-words", default=80, show_default=True, type=click.IntRange(1), help="Words in each prompt.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1), help="Tokens per reply.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0, 2))
@click.option("--seed", type=int, help="The same seed gives the same prompts (default: new ones in each run).")
@click.option("--no-stream", is_flag=True, help="Request whole replies, without times of single tokens.")
@click.option(
    "--json",
    "json_file",
    type=click.File("w", encoding="utf-8", lazy=True),
    help="Write the figures to this file; - is standard output.",
)
def bench(
    url: str,
    key: str | None,
    model: str | None,
    concurrency: str,
    requests: int,
    prompt_words: int,
    seed: int | None,
    no_stream: bool,
    json_file: Any,
    **sampling: Any,
) -> None:
    """Measure the latency and throughput of a server.

    The load is a closed loop: each caller sends its next chat when the last one is complete. No two prompts are the
    same, in one run or, without --seed, in two, so only the chat template can be found in the prefix cache. Every
    reply has --max-tokens tokens, because end-of-text tokens are ignored.

    TTFT is the time to the first text, TPOT the mean time between the later tokens of a reply, and e2e the time of the
    whole request.
    """
    counts = _numbers(concurrency)
    client = Client(url, key)
    load: Body = {"model": model or first_model(client), **sampling, "ignore_eos": True}
    if not no_stream:
        load |= {"stream": True, "stream_options": {"include_usage": True}}
    if json_file is not None:
        json_file.open()  # one that cannot be written is known before the measurement
    ask = partial(_asked, whole if no_stream else streamed, client)
    seed = random.randrange(10**9) if seed is None else seed
    prompts = _prompts(seed, prompt_words)
    ask(_body(load, next(prompts)) | {"max_tokens": 2})  # a warm-up: the first request pays for lazy starts
    heading = f"{load['model']} at {url}: {prompt_words} words in, {sampling['max_tokens']} tokens out"
    _say(f"{heading}; --seed {seed}; times in ms")
    _say("  ".join(title.rjust(width) for title, _, width in COLUMNS))
    rows: list[dict[str, Any]] = []
    errors = 0
    for callers in counts:
        bodies = (_body(load, text) for text in islice(prompts, callers * requests))
        result = closed_loop(ask, bodies, callers)
        rows.append(result.summary())
        errors += _show(result, rows[-1])
    if json_file is not None:
        asked = {"url": url, "request": load, "prompt_words": prompt_words, "seed": seed}
        json.dump(asked | {"results": rows}, json_file, indent=2)
        json_file.write("\n")
    if errors:
        raise SystemExit(1)


def _asked(ask: Callable[[Client, Body], Sample], client: Client, body: Body) -> Sample:
    with client.understood():
        return ask(client, body)


def _prompts(seed: int, words: int) -> Iterator[str]:
    numbers = random.Random(seed)
    while True:
        yield prompt(numbers.randrange(10**9), words)


def _body(load: Body, text: str) -> Body:
    return load | {"messages": [{"role": "user", "content": text}]}


def _show(result: Result, row: dict[str, Any]) -> int:
    """Print a line of the table and return the number of errors."""
    cells = ("–" if row[column] is None else str(row[column]) for _, column, _ in COLUMNS)
    _say("  ".join(cell.rjust(width) for cell, (_, _, width) in zip(cells, COLUMNS, strict=True)))
    if result.errors:
        _say(f"first error: {result.errors[0]}")
    return len(result.errors)


def _say(line: str) -> None:
    # for people, so that standard output is free for --json -
    click.echo(line, err=True)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise click.BadParameter("expected numbers of callers such as 1,8,32", param_hint="--concurrency")
    return found
