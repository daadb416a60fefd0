"""The schedule of CI: each line is a crontab's and names a command of the tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def entries() -> list[list[str]]:
    """Return the fields of each line that is no comment: five of time, and the command."""
    lines = (ROOT / ".ci/schedule").read_text().splitlines()
    return [line.split(maxsplit=5) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry[-1])
def test_what_is_scheduled_can_be_run(entry: list[str]) -> None:
    """A scheduled command is a program of the tree."""
    assert len(entry) == 6
    assert os.access(ROOT / entry[5], os.X_OK)


def test_the_newest_versions_are_tried_weekly() -> None:
    """One line runs the newest versions on one day of each week, at one time."""
    (entry,) = (entry for entry in entries() if entry[5] == ".ci/weekly")
    minute, hour, day, month, weekday = entry[:5]
    assert (day, month) == ("*", "*")
    assert minute.isdigit()
    assert hour.isdigit()
    assert weekday in "0123456"
    assert "tests/newest.sh" in (ROOT / ".ci/weekly").read_text()
