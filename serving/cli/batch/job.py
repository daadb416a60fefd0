"""``mlflow-llm batch --job``: a file of requests as one of a server's batches (``/v1/batches``).

The batch's id is kept beside the output until the output is complete, so that the same command finds it again after any
interruption: an input is uploaded once.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from ...interface.errors import InvalidField
from ...system.backoff import Backoff
from ...system.files import replacing
from ..http import Client, first_model
from .backends import RowAnswer, line_of
from .journal import Journal
from .rows import Row, Rows

ENDED = ("completed", "failed", "expired", "cancelled")
FIRST_WAIT, MAX_WAIT = 0.2, 10.0  # seconds between looks at a batch


class JobBackend:
    """A server's batch, from the upload of its input to its output."""

    def __init__(self, url: str, key: str | None, model: str | None, output: Path) -> None:
        self._client = Client(url, key)
        self._url = url
        self._model = model
        self._note = output.with_name(f"{output.name}.job")

    def run(self, rows: Rows, journal: Journal, kept: set[str], window: str) -> None:
        """Write the answers to the rows without one, as soon as the batch has ended.

        Raises ``ClickException`` if the batch cannot be created, or ends without having answered all of them.
        """
        left = {row.key: row for row in rows.without(kept)}
        batch = self._ended(self._noted(left) or self._create(left, window), len(left))
        missing = len(left) - self._write(batch, left, journal)
        self._note.unlink(missing_ok=True)
        if batch["status"] == "failed":
            reasons = "; ".join(f"line {one['line']}: {one['message']}" for one in batch["errors"]["data"][:3])
            raise click.ClickException(f"batch {batch['id']} failed: {reasons}")
        if missing:
            raise click.ClickException(f"batch {batch['id']} is {batch['status']}; {missing} rows have no answer")

    def _noted(self, left: dict[str, Row]) -> str | None:
        """Return the id of the batch that an earlier run of the command created for these rows, if there is one."""
        try:
            noted = json.loads(self._note.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            raise click.ClickException(f"{self._note} is not the note of a batch; remove it") from None
        if noted.get("url") != self._url or not left.keys() <= set(noted.get("rows", ())):
            raise click.ClickException(
                f"{self._note} is of another batch, {noted.get('id')} at {noted.get('url')}; finish that with its own "
                "input, or remove the file"
            )
        return str(noted["id"])

    def _create(self, left: dict[str, Row], window: str) -> str:
        lines, paths = [], set()
        model = self._model
        for row in left.values():
            try:
                path, body = row.asked
            except InvalidField as error:
                raise click.ClickException(f"line {row.line}: {error.message}") from None
            if "model" not in body:
                model = model or first_model(self._client)
                body = {"model": model, **body}
            paths.add(path)
            lines.append({"custom_id": row.key, "method": "POST", "url": path, "body": body})
        if len(paths) > 1:
            raise click.ClickException(f"a batch has one endpoint; these rows have {', '.join(sorted(paths))}")
        file = self._upload("".join(json.dumps(line) + "\n" for line in lines).encode())
        body = {"input_file_id": file["id"], "endpoint": paths.pop(), "completion_window": window}
        batch = self._client.post("/v1/batches", body)
        with replacing(self._note) as note:
            note.write(json.dumps({"url": self._url, "id": batch["id"], "rows": sorted(left)}).encode())
        click.echo(f"batch {batch['id']} at {self._url}", err=True)
        return str(batch["id"])

    def _upload(self, content: bytes) -> Any:
        boundary = secrets.token_hex(16)
        head = "".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{end}'
            for name, end in (("purpose", "batch\r\n"), ('file"; filename="batch.jsonl', ""))
        )
        body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        return self._client.post_bytes("/v1/files", body, f"multipart/form-data; boundary={boundary}")

    def _ended(self, batch_id: str, total: int) -> Any:
        """Wait for the end of the batch and return it. A server that is away for a while changes nothing."""
        backoff = Backoff(FIRST_WAIT, MAX_WAIT, jitter=(0.8, 1.0))
        bar = tqdm(total=total, unit="row", desc="batch", disable=None)
        try:
            while True:
                batch = _patiently(lambda: self._client.get(f"/v1/batches/{batch_id}"))
                counts = batch["request_counts"]
                bar.update(counts["completed"] + counts["failed"] - bar.n)
                if batch["status"] in ENDED:
                    return batch
                time.sleep(backoff.failed())
        except KeyboardInterrupt:
            click.echo(f"\nbatch {batch_id} goes on at the server; the same command waits for it again", err=True)
            raise SystemExit(130) from None
        finally:
            bar.close()

    def _write(self, batch: Any, left: dict[str, Row], journal: Journal) -> int:
        """Write the answers of a batch, and return how many there are."""
        written = 0
        for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            text = _patiently(partial(self._client.get_text, f"/v1/files/{file_id}/content"))
            for one in filter(None, text.split("\n")):  # not splitlines: a JSON text may have U+2028
                found = json.loads(one)
                row, response = left.get(found["custom_id"]), found["response"]
                if row is not None and response is not None:
                    answered = RowAnswer(response["status_code"], response["body"], response["request_id"])
                    journal.write(line_of(row, answered))
                    written += 1
        return written

    def close(self) -> None:
        self._client.close()


def _patiently(ask: Callable[[], Any]) -> Any:
    """Return what ``ask`` does, tried again for a while if the server does not answer."""
    backoff = Backoff(0.5, 8.0, jitter=(0.8, 1.0))
    for _ in range(8):
        try:
            return ask()
        except click.ClickException as error:
            if not error.message.startswith(("no server answers", "502", "503")):
                raise
        time.sleep(backoff.failed())
    return ask()
