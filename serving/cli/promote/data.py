"""Requests of a file or of a dataset of MLflow, answered by both versions with engines of this process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click

from ...interface.errors import InvalidField, PackagingError, ServingError, shown
from ..batch.backends import ModelBackend, answer_all, patiently
from ..batch.rows import Row
from .pairs import Outcome, Pair, outcome_of

GENERATING = ("/v1/chat/completions", "/v1/completions")
SHAPE = ("inputs", "expectations", "tags", "source")  # of a record in MLflow's datasets
DATASET_ID = re.compile(r"d-[0-9a-f]{32}")
SEEDS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A request of the data, and what is expected of its answer."""

    name: str
    body: dict[str, Any]
    expectations: dict[str, Any] = field(default_factory=dict)


def examples_of(source: str) -> list[Example]:
    """Return the requests of a JSONL file, or of the dataset of MLflow with this name or id. Raises
    ``ClickException``."""
    if os.path.exists(source):
        records = _lines(source)
    elif os.sep in source or source.endswith((".jsonl", ".json")):
        raise click.ClickException(f"--data {source}: there is no such file")
    else:
        records = _dataset(source)
    found = [_example(source, name, record) for name, record in records]
    if not found:
        raise click.ClickException(f"--data {source}: it has no requests")
    return found


def _lines(source: str) -> Iterator[tuple[str, Any]]:
    try:
        with open(source, "rb") as stream:
            for number, text in enumerate(stream, 1):
                if not text.strip():
                    continue
                try:
                    yield f"line {number}", json.loads(text)
                except (ValueError, RecursionError):
                    raise click.ClickException(f"--data {source}: line {number}: it is not JSON") from None
    except OSError as error:
        raise click.ClickException(f"--data {source}: {error.strerror or error}") from None


def _dataset(source: str) -> Iterator[tuple[str, Any]]:
    from mlflow.exceptions import MlflowException
    from mlflow.genai.datasets import get_dataset

    try:
        found = get_dataset(dataset_id=source) if DATASET_ID.fullmatch(source) else get_dataset(name=source)
        frame = found.to_df()
    except MlflowException as error:
        raise click.ClickException(
            f"--data {source}: no such file, and no dataset of MLflow: {error.message}"
        ) from None
    for number, record in enumerate(frame.to_dict(orient="records"), 1):
        yield f"record {number}", {name: record.get(name) for name in SHAPE if isinstance(record.get(name), dict)}


def _example(source: str, name: str, record: Any) -> Example:
    """Return the request of a line: MLflow's shape, a line of a batch, or the request itself. Raises
    ``ClickException``."""
    where = f"--data {source}: {name}"
    if not isinstance(record, dict):
        raise click.ClickException(f"{where}: {shown(record)} is not a JSON object")
    expectations: Any = {}
    if "inputs" in record:
        if others := [one for one in record if one not in SHAPE]:
            raise click.ClickException(f"{where}: {others[0]!r} is not known; expected {', '.join(SHAPE)}")
        body, expectations = record["inputs"], record.get("expectations") or {}
    else:
        body = record.get("body", record)
    for field_, value in (("inputs", body), ("expectations", expectations)):
        if not isinstance(value, dict):
            raise click.ClickException(f"{where}: {field_}: {shown(value)} is not a JSON object")
    body = _seeded(body)
    try:
        path, _ = Row(0, name, name, None, body).asked
    except InvalidField as error:
        raise click.ClickException(f"{where}: {error.message}") from None
    if path not in GENERATING:
        raise click.ClickException(f"{where}: it asks for no text; expected a request with messages or a prompt")
    return Example(name=name, body=body, expectations=expectations)


def _seeded(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with a seed of its own: another evaluation of the same data has the same answers."""
    if body.get("seed") is not None:
        return dict(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).digest()
    return {**body, "seed": int.from_bytes(digest[:4], "big") % SEEDS}


def predicted(examples: Sequence[Example], current: str, candidate: str, settings: dict[str, Any]) -> list[Pair]:
    """Return the requests with the answers of the models at both URIs, which are loaded one after the other. Raises
    ``ClickException``."""
    before, after = (_answers(examples, uri, settings) for uri in (current, candidate))
    return [
        Pair(
            name=example.name,
            inputs=example.body,
            expectations=example.expectations,
            current=one,
            candidate=other,
        )
        for example, one, other in zip(examples, before, after, strict=True)
    ]


def _answers(examples: Sequence[Example], uri: str, settings: dict[str, Any]) -> list[Outcome]:
    click.echo(f"{uri} answers {len(examples)} requests", err=True)
    stop = threading.Event()
    try:
        with closing(ModelBackend(uri, settings, stop)) as backend:
            return answer_all(partial(_answer, backend, stop), examples, stop, concurrency=backend.concurrency)
    except (ServingError, PackagingError) as error:
        raise click.ClickException(f"{uri}: {error}") from None


def _answer(backend: ModelBackend, stop: threading.Event, example: Example) -> Outcome:
    row = Row(0, example.name, example.name, None, example.body)
    found = patiently(backend, stop, row, example.name)
    return outcome_of(found.status, found.body)
