"""Numbers of bytes on the command line."""

from __future__ import annotations

import click
import pytest

from mlflow_llm.serving.cli.serve.sizes import Size


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("8000000000", 8 * 10**9),
        ("8GB", 8 * 10**9),
        ("7.5GiB", 15 * 2**29),
        ("512 mib", 2**29),
        ("64k", 64_000),
        ("1b", 1),
        (4096, 4096),
    ],
)
def test_units(given: str | int, size: int) -> None:
    """Sizes have decimal or binary units in either case, with or without a space."""
    assert Size().convert(given, None, None) == size


@pytest.mark.parametrize("given", ["", "0", "-1", "1e9", "lots", "8 GiBs", "0.0001k", "9" * 40, "8GB8", "inf", "٣"])
def test_invalid_sizes_are_refused(given: str) -> None:
    """A value that is not a size is refused with an error that says what is allowed."""
    with pytest.raises(click.BadParameter, match=r"number of bytes|at least 1 byte"):
        Size().convert(given, None, None)
