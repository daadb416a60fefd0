"""The evaluation of both versions as a run of MLflow.

The run has a nested one for each version, with the scores of every answer as MLflow's own evaluation keeps them (traces
with assessments). What is compared and decided is in the run itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import click

from .comparison import Comparison, Decision, compare
from .pairs import Pair
from .scorers import number_of

ROW = "mlflow_llm.pair"  # the tag of a trace that says which pair it belongs to
DECISION, REASON = "mlflow_llm.decision", "mlflow_llm.reason"
MAX_VALUE = 5000  # characters of a tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of one version: by pair, the number of each feedback; None for a pair at which a scorer failed or gave
    no number, and ``problems`` says why."""

    numbers: list[dict[str, float] | None]
    problems: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The comparison over all scorers, of which each counts the same, and the one of each scorer by its name."""

    overall: Comparison
    by_scorer: Mapping[str, Comparison]


@contextmanager
def evaluation_run(experiment: str | None, title: str) -> Iterator[Any]:
    """Start the run; if it ends by an error, that is its reason."""
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        if experiment is not None:
            mlflow.set_experiment(experiment)
        with mlflow.start_run(run_name=title) as run:
            try:
                yield run
            except BaseException as error:
                said = error.message if isinstance(error, click.ClickException | MlflowException) else repr(error)
                mlflow.set_tags({DECISION: "refused", REASON: str(said)[:MAX_VALUE]})
                raise
    except MlflowException as error:
        raise click.ClickException(f"MLflow: {error.message}") from None


def score(pairs: Sequence[Pair], scorers: list[Any], *, of: str, uri: str) -> Scores:
    """Score the answers of one version, ``of`` being ``current`` or ``candidate``, in a nested run."""
    import mlflow

    from mlflow_llm.flavors.llm.model.model_registry import logged_model_id

    data = [
        {
            "inputs": pair.inputs,
            "outputs": getattr(pair, of).output,
            "tags": {ROW: str(place)},
            **({"expectations": pair.expectations} if pair.expectations else {}),
        }
        for place, pair in enumerate(pairs)
    ]
    with mlflow.start_run(run_name=f"{of}: {uri}", nested=True) as run:
        mlflow.set_tag("mlflow_llm.version", uri)
        with redirect_stdout(sys.stderr):  # MLflow says where its results are
            mlflow.genai.evaluate(data=data, scorers=scorers, model_id=logged_model_id(uri))
        place = {"locations": [run.info.experiment_id], "run_id": run.info.run_id}
        traces: Any = mlflow.search_traces(**place, include_spans=False, return_type="list", flush=True)
    return _scores(traces, len(pairs))


def _scores(traces: list[Any], count: int) -> Scores:
    numbers: list[dict[str, float] | None] = [None] * count
    problems: list[str] = []
    for trace in traces:
        place = trace.info.tags.get(ROW)
        if place is not None:
            numbers[int(place)] = _numbers(trace.info.assessments, problems)
    return Scores(numbers=numbers, problems=problems)


def _numbers(assessments: Sequence[Any], problems: list[str]) -> dict[str, float] | None:
    found: dict[str, float] = {}
    is_whole = True
    for one in assessments:
        if one.feedback is None:  # an expectation
            continue
        value = None if one.error is not None else number_of(one.feedback.value)
        if value is not None:
            found[one.name] = value
            continue
        is_whole = False
        why = one.error.error_message if one.error is not None else f"{one.feedback.value!r} is no number"
        problems.append(f"{one.name}: {why!s:.300}")
    return found if is_whole and found else None


def scored(current: Scores, candidate: Scores) -> dict[int, tuple[dict[str, float], dict[str, float]]]:
    """Return the numbers of both versions, by the places of the pairs that have all of them.

    A feedback that only some of the pairs have leaves the others out.
    """
    both = {
        place: (before, after)
        for place, (before, after) in enumerate(zip(current.numbers, candidate.numbers, strict=True))
        if before is not None and after is not None
    }
    names = {name for numbers in both.values() for one in numbers for name in one}
    return {place: numbers for place, numbers in both.items() if all(names == one.keys() for one in numbers)}


def compared(pairs: Collection[tuple[dict[str, float], dict[str, float]]], confidence: float) -> Evaluated:
    """Compare the versions by the numbers of pairs, at least two."""

    def columns(value: Callable[[dict[str, float]], float]) -> tuple[list[float], list[float]]:
        return [value(before) for before, _ in pairs], [value(after) for _, after in pairs]

    names = list(next(iter(pairs))[0])
    return Evaluated(
        overall=compare(*columns(lambda numbers: sum(numbers.values()) / len(numbers)), confidence),
        by_scorer={name: compare(*columns(itemgetter(name)), confidence) for name in names},
    )


def log_evaluation(evaluated: Evaluated, pairs: Sequence[Pair], current: Scores, candidate: Scores) -> None:
    """Log the numbers and a table of the pairs."""
    import mlflow

    metrics = _metrics("", evaluated.overall)
    for name, one in evaluated.by_scorer.items():
        metrics |= _metrics(f"by_scorer/{name}/", one)
    mlflow.log_metrics(metrics)
    table: dict[str, list[Any]] = {
        "request": [pair.name for pair in pairs],
        "inputs": [pair.inputs for pair in pairs],
        "current": [pair.current.output for pair in pairs],
        "candidate": [pair.candidate.output for pair in pairs],
    }
    for name in evaluated.by_scorer:
        table[f"{name} (current)"] = [(numbers or {}).get(name) for numbers in current.numbers]
        table[f"{name} (candidate)"] = [(numbers or {}).get(name) for numbers in candidate.numbers]
    mlflow.log_table(table, "pairs.json")


def _metrics(prefix: str, one: Comparison) -> dict[str, float]:
    return {
        f"{prefix}current_score": one.current,
        f"{prefix}candidate_score": one.candidate,
        f"{prefix}difference": one.difference,
        f"{prefix}standard_error": one.standard_error,
        f"{prefix}lower_bound": one.lower_bound,
        f"{prefix}wins": one.wins,
        f"{prefix}losses": one.losses,
    }


def log_decision(decision: Decision, *, dry_run: bool) -> str:
    """Log what was decided as tags, and return it in a word."""
    import mlflow

    said = ("would_promote" if dry_run else "promoted") if decision.is_better else "not_better"
    mlflow.set_tags({DECISION: said, REASON: decision.reason[:MAX_VALUE]})
    return said
