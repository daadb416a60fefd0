"""Scorers by their names: those of MLflow, and functions or objects of the user's modules."""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Any

import click

RATINGS = {"yes": 1.0, "no": 0.0}


def scorer_of(name: str, judge: str | None) -> Any:
    """Return the scorer ``module:object``, or MLflow's own of this name, which asks ``judge``.

    Raises ``UsageError``.
    """
    from mlflow.genai.scorers import Scorer

    module, colon, attribute = name.partition(":")
    found = _ours(name, module, attribute) if colon else _built_in(name, judge)
    if not isinstance(found, Scorer):
        from mlflow.genai import scorer

        if not callable(found) or isinstance(found, type):
            raise click.UsageError(f"--scorer {name}: it is a {type(found).__name__}, neither a scorer nor a function")
        found = scorer(found)
    if found.is_session_level_scorer:
        raise click.UsageError(f"--scorer {name}: it scores whole conversations, not the answers to single requests")
    return found


def _ours(name: str, module: str, attribute: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as with python -m
    try:
        found = importlib.import_module(module)
    except Exception as error:  # the user's module raises what it likes
        raise click.UsageError(
            f"--scorer {name}: {module} cannot be imported ({type(error).__name__}: {error})"
        ) from None
    try:
        return getattr(found, attribute)
    except AttributeError:
        raise click.UsageError(f"--scorer {name}: the module {module} has no {attribute!r}") from None


def _built_in(name: str, judge: str | None) -> Any:
    import mlflow.genai.scorers as known
    from mlflow.genai.scorers.builtin_scorers import BuiltInScorer

    made: Any = getattr(known, name, None) if name in known.__all__ else None
    if not (isinstance(made, type) and issubclass(made, BuiltInScorer)):
        raise click.UsageError(f"--scorer {name}: MLflow has no scorer of this name; yours are MODULE:NAME")
    of_scorer: Any = made  # pydantic's, which mypy does not see
    asks = "model" in of_scorer.model_fields
    if asks and judge is None:
        raise click.UsageError(f"--scorer {name}: it asks a model; name one with --judge, such as endpoints:/judge")
    try:
        return of_scorer(model=judge) if asks else of_scorer()
    except ValueError as error:  # pydantic's, of what it has to be told
        wanted = ", ".join(str(one["loc"][0]) for one in getattr(error, "errors", list)() if one.get("loc"))
        raise click.UsageError(
            f"--scorer {name}: it needs {wanted or 'arguments'}; make it in a module of yours, and name it MODULE:NAME"
        ) from None


def number_of(value: Any) -> float | None:
    """Return a feedback's value as a number: yes and true are 1, no and false 0. None for any other text or object."""
    if isinstance(value, bool | int | float):
        return float(value) if math.isfinite(value) else None
    return RATINGS.get(str(getattr(value, "value", value)).lower())
