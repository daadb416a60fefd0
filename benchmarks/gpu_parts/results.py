"""The records of a run, which are written and shown as soon as they come: a run may be killed at any time."""

from __future__ import annotations

import os
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from report import write

from . import inputs, table
from .plan import Plan, Record


class Results:
    """The records of a run of ``plan`` and what is said of them, in ``file`` beside ``about``, and on the output."""

    def __init__(self, plan: Plan, file: Path, about: dict[str, Any]) -> None:
        self.records: list[Record] = []
        self._plan, self._file, self._about = plan, file, about
        self._said: set[table.Row] = set()
        self._lock = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, record: Record) -> None:
        """Keep, write and show a record. May be called by several threads."""
        with self._lock:
            if "log" in record:
                self._file.with_suffix(".tests.txt").write_text(record.pop("log"))
            self.records.append(record)
            self.write()
            if {"cut", "error"} & record.keys():
                print("\n".join(table.notes([record])), flush=True)
            if record["part"] != "families":  # which are many: they are said together
                self._say()

    def say(self) -> None:
        """Print the rows of the table that are new."""
        with self._lock:
            self._say()

    def _say(self) -> None:
        for row in self._table.rows():
            if row not in self._said:
                self._said.add(row)
                print(table.line(row), flush=True)

    def write(self, **more: Any) -> None:
        """Replace the file by one with all records and what is known about the run."""
        self._about |= more
        new = self._file.with_name(f"{self._file.name}.new")
        write(new, {**self._about, "records": self.records})
        os.replace(new, self._file)

    @property
    def _table(self) -> table.Table:
        return table.Table(self._plan, self._config, self.records)

    @cached_property
    def _config(self) -> Any:
        return inputs.config_in(self._plan)

    def text(self) -> str:
        """Return everything as Markdown: the table, remarks, and the tables by kernel."""
        parts = (self._heading(), self._table.text(), "\n".join(table.notes(self.records)), table.kernels(self.records))
        return "\n".join(parts)

    def _heading(self) -> str:
        device: Record = next((record for record in self.records if record["part"] == "device"), {})
        speeds = ""
        if device:
            copies, matrix = device["copies"] / 1e9, device["matrix"] / 1e12
            speeds = f", copies at {copies:,.0f} GB/s, products at {matrix:,.1f} TFLOP/s"
        return f"Llama {self._plan.size}, prompts of {self._plan.prompt} tokens, {self._plan.new} new{speeds}"
