"""Build a notebook from the sources of its cells, run it, and store it without what differs from run to run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).resolve().parent


def is_heading(source: str) -> bool:
    """Return whether a cell's source begins with a heading, and so is text."""
    return source.startswith("#")


def build(sources: Sequence[str], is_text: Callable[[str], bool] = is_heading) -> nbformat.NotebookNode:
    """Return the notebook of these cells, which has not been run. ``is_text`` says which of them are Markdown."""
    cells = []
    for number, source in enumerate(sources):
        cell = new_markdown_cell(source) if is_text(source) else new_code_cell(source)
        cell["id"] = f"cell-{number}"  # random ids would change the file with every build
        cells.append(cell)
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return new_notebook(cells=cells, metadata=metadata)


def store(name: str, notebook: nbformat.NotebookNode, *, seconds: int) -> None:
    """Run a notebook, at most ``seconds`` a cell, and write it to ``name`` in this folder.

    Exits with a message if an output names a path of this machine.
    """
    NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(HERE)}}).execute()
    without_noise(notebook)
    text = nbformat.writes(notebook)
    for private in {str(HERE.parents[0]), os.path.expanduser("~"), "/tmp/"}:
        if private in text:
            raise SystemExit(f"an output names a path of this machine: {private}")
    (HERE / name).write_text(text + "\n")


def without_noise(notebook: nbformat.NotebookNode) -> None:
    """Remove outputs that differ from run to run and carry no information: progress bars, warnings and times."""
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)
        if "outputs" in cell:
            kept = [o for o in cell.outputs if o.get("name") != "stderr" and "widget" not in str(o.get("data"))]
            cell.outputs = joined(kept)
    notebook.metadata.pop("widgets", None)


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join adjacent pieces of printed text into one output, because a stream prints token by token."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream" and output.name == found[-1].name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found
