"""``mlflow-llm batch``: a file of requests answered into a file, resumable after any interruption."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from ...interface.errors import PackagingError, ServingError
from ..http import url_options
from ..model_options import engine_overrides
from .backends import Backend, GivenUp, ModelBackend, RowAnswer, ServerBackend, line_of, patiently
from .job import JobBackend
from .journal import Journal
from .rows import Row, Rows

INTERRUPTED_STATUS = 130


class Stopped(click.ClickException):
    """The batch stopped before its end. What is written stays, and the same command resumes it."""

    exit_code = 2


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Output file, one line per row.",
)
@click.option("-m", "--model-uri", help="Load this model here instead of using the server at --url.")
@click.option(
    "-C",
    "--config",
    multiple=True,
    metavar="KEY=VALUE",
    help="With -m: engine setting (mlflow-llm help settings); repeatable.",
)
@url_options
@click.option("--model", help="Endpoint or endpoint:adapter for rows without a model (default: the server's first).")
@click.option(
    "--concurrency", type=click.IntRange(1, 4096), help="Concurrent rows (default: 32; with -m: max_num_seqs)."
)
@click.option(
    "--retries",
    default=8,
    show_default=True,
    type=click.IntRange(0),
    help="Retries of a row while the server is busy or unavailable.",
)
@click.option("--retry-failed", is_flag=True, help="Send rows again whose last answer was an error.")
@click.option(
    "--order",
    default="input",
    show_default=True,
    type=click.Choice(["input", "completion"]),
    help="Order of the lines once all are written.",
)
@click.option("--job", is_flag=True, help="Run it as a batch of the server, in the time that other requests leave.")
@click.option(
    "--window", metavar="HOURS", help="With --job: when what is not answered expires, from 1h (default: 24h)."
)
@click.pass_context
def batch(
    context: click.Context,
    source: Path,
    output: Path,
    model_uri: str | None,
    config: tuple[str, ...],
    url: str,
    key: str | None,
    model: str | None,
    concurrency: int | None,
    retries: int,
    retry_failed: bool,
    order: str,
    job: bool,
    window: str | None,
) -> None:
    """Answer a file of requests.

    SOURCE has one JSON object per line: OpenAI's {"custom_id", "method", "url", "body"}, or a request itself (with
    messages, prompt, input, query or text_1). The answers are written to -o, one line per row.

    An answer counts once its line is on the disk. If the batch is interrupted, run the same command again: it answers
    the rows that have no line yet.

    With --job, the rows become one of the server's batches (/v1/batches), which goes on without this command.

    Exit status: 0 if all rows were answered, 1 if some failed, 2 if the batch stopped before the end.
    """
    if model_uri is not None and model is not None:
        raise click.UsageError("--model goes with a server; with -m, rows can name an adapter")
    if config and model_uri is None:
        raise click.UsageError("-C goes with -m; a running server has its own settings")
    if job and (model_uri is not None or concurrency is not None):
        raise click.UsageError("--job goes with a server, which decides how many rows run at once")
    if window is not None and not job:
        raise click.UsageError("--window goes with --job")
    if output.exists() and output.samefile(source):
        raise click.UsageError("-o: this is the input file")
    started = time.monotonic()
    with _stopping(source):
        settings = engine_overrides(config, here=True)
        rows = Rows(source)
    with _stopping(output):
        journal = Journal(output, rows.keys)
    try:
        kept = {key for key, entry in journal.done.items() if not (retry_failed and entry.failed)}
        if len(kept) < len(rows) and job:
            with _stopping(url), contextlib.closing(JobBackend(url, key, model, output)) as server:
                server.run(rows, journal, kept, window or "24h")
        elif len(kept) < len(rows):
            run = _Run(rows, journal, kept, retries)
            with _stopping(url if model_uri is None else model_uri):
                backend: Backend = (
                    ServerBackend(url, key, model) if model_uri is None else ModelBackend(model_uri, settings, run.stop)
                )
            try:
                run.answer(backend, concurrency or backend.concurrency)
            finally:
                backend.close()
        _finish(journal, rows, order)
    finally:
        _summary(journal, len(rows), time.monotonic() - started)
        journal.close()
    context.exit(1 if journal.failed else 0)


@contextlib.contextmanager
def _stopping(what: Path | str) -> Iterator[None]:
    """Turn errors inside into ``Stopped``; ``what`` names their cause."""
    try:
        yield
    except click.ClickException as error:
        raise Stopped(error.message) from None
    except (ServingError, PackagingError) as error:
        raise Stopped(f"{what}: {error}") from None
    except OSError as error:
        raise Stopped(f"{what}: {error.strerror or error}") from None


class _Run:
    """The rows that are not answered yet, and the threads that answer them."""

    def __init__(self, rows: Rows, journal: Journal, kept: set[str], retries: int) -> None:
        self.stop = threading.Event()
        self._journal, self._retries = journal, retries
        self._left = rows.without(kept)
        self._lock = threading.Lock()
        self._broken: BaseException | None = None
        self._bar = tqdm(total=len(rows), initial=len(kept), unit="row", desc="batch", disable=None)

    def answer(self, backend: Backend, concurrency: int) -> None:
        """Answer the rows, ``concurrency`` at a time. Raises ``Stopped`` where the rest cannot be answered."""
        threads = [threading.Thread(target=self._work, args=(backend,), daemon=True) for _ in range(concurrency)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(1.0)  # with a timeout, for Ctrl-C to be handled
        except KeyboardInterrupt:
            self.stop.set()
            raise SystemExit(INTERRUPTED_STATUS) from None
        finally:
            self._bar.close()
        if isinstance(self._broken, click.ClickException | OSError):
            why = self._broken.message if isinstance(self._broken, click.ClickException) else self._broken.strerror
            raise Stopped(f"{why}; run the same command again to continue with the remaining rows")
        if self._broken is not None:
            raise self._broken

    def _work(self, backend: Backend) -> None:
        try:
            for row in self._rows():
                answered = self._ask(backend, row)
                if answered is None:
                    return
                self._journal.write(line_of(row, answered))
                self._bar.update()
        except BaseException as error:
            self._broken = self._broken or error
            self.stop.set()

    def _rows(self) -> Iterator[Row]:
        while not self.stop.is_set():
            with self._lock:
                row = next(self._left, None)
            if row is None:
                return
            yield row

    def _ask(self, backend: Backend, row: Row) -> RowAnswer | None:
        """Return the row's answer after retries; None where the batch was stopped. Raises ``ClickException``."""
        try:
            answered = patiently(backend, self.stop, row, f"line {row.line}", retries=self._retries)
        except GivenUp:
            return None
        return None if self.stop.is_set() and answered.status == 499 else answered


def _finish(journal: Journal, rows: Rows, order: str) -> None:
    """Put the complete output in order, one line a row. Raises ``Stopped``."""
    by = list(rows.keys) if order == "input" else sorted(rows.keys, key=lambda key: journal.done[key].place)
    try:
        journal.put_in_order(by)
    except OSError as error:
        raise Stopped(f"all answers are written, but could not be put in order: {error.strerror}") from None


def _summary(journal: Journal, total: int, seconds: float) -> None:
    usage: dict[str, Any] = journal.usage
    failed, left = journal.failed, total - len(journal.done)
    parts = [f"{len(journal.done) - failed} of {total} rows answered", f"{failed} failed"]
    parts += [f"{left} left"] if left else []
    tokens = f"{usage['prompt_tokens']} prompt tokens ({usage['cached_tokens']} cached)"
    click.echo(f"{', '.join(parts)}; {tokens}, {usage['completion_tokens']} new; {seconds:.1f} s", err=True)
