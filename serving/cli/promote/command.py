"""``mlflow-llm promote``: an alias moved to a version, with ``--if-better`` only if its answers score better."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

import click

from ..http import Client, url_options
from ..model_options import engine_overrides
from .comparison import DEFAULT_CONFIDENCE, decide
from .data import examples_of, predicted
from .evaluation import compared, evaluation_run, log_decision, log_evaluation, score, scored
from .logged import logged_pairs
from .pairs import Pair
from .scorers import scorer_of
from .versions import Move, check_version, move, move_of, uri_of

NOT_BETTER = 3  # the exit status
OF_AN_EVALUATION = (
    *("endpoint", "data", "scorers", "judge", "margin", "confidence"),
    *("min_requests", "against", "experiment", "config"),
)


@click.command()
@click.argument("version", metavar="models:/NAME/VERSION")
@click.option("--alias", required=True, help="Alias of the registered model that is moved to VERSION.")
@click.option("--if-better", is_flag=True, help="Evaluate VERSION, and move the alias only if it is better.")
@click.option(
    "--endpoint", metavar="NAME", help="Endpoint in whose payload log both have answered, VERSION as a shadow."
)
@click.option(
    "--data", metavar="FILE|DATASET", help="Requests that both versions answer: JSONL, or a dataset of MLflow."
)
@click.option(
    "--scorer",
    "scorers",
    multiple=True,
    metavar="NAME",
    help="Scorer of MLflow, or MODULE:NAME of yours; repeatable. Higher is better.",
)
@click.option("--judge", metavar="URI", help="Model that MLflow's scorers ask, such as endpoints:/judge.")
@click.option(
    "--margin", type=click.FloatRange(0, min_open=True), help="How much higher the mean score has to be, at least."
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    help="Require also that the difference is above 0 with this probability.",
)
@click.option(
    "--min-requests",
    default=30,
    show_default=True,
    type=click.IntRange(2),
    help="Requests that both versions have to have answered and been scored for.",
)
@click.option("--against", metavar="VERSION", help="Compare with this version (default: the one that the alias names).")
@click.option("--experiment", help="Experiment of MLflow for the run of the evaluation (default: the active one).")
@click.option(
    "-C",
    "--config",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --data: engine setting (mlflow-llm help settings); repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Move nothing; say what would be done.")
@url_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def promote(
    context: click.Context,
    version: str,
    alias: str,
    if_better: bool,
    endpoint: str | None,
    data: str | None,
    scorers: tuple[str, ...],
    judge: str | None,
    margin: float | None,
    confidence: float | None,
    min_requests: int,
    against: str | None,
    experiment: str | None,
    config: tuple[str, ...],
    dry_run: bool,
    url: str,
    key: str | None,
    as_json: bool,
) -> None:
    """Move an alias of a registered model to another version.

    With --if-better, VERSION is first compared with the version that the alias names: by their answers to the same
    requests, which the payload log of --endpoint has, or which both give now to --data. Scorers of MLflow score them,
    and the alias moves only if the mean score is higher by --margin. The evaluation is a run of MLflow. A version that
    fails at requests that the other one answers is not better.

    Exit status: 0 if the alias names VERSION, or would with --dry-run; 3 if VERSION is not better; 1 if that could not
    be found out.
    """
    planned = move_of(version, alias)
    if not if_better:
        _refuse_evaluation(context)
        _moved(planned, dry_run=dry_run, as_json=as_json)
        return
    if not scorers:
        raise click.UsageError("--if-better needs a --scorer, by which the versions are compared")
    if margin is None:
        raise click.UsageError("--if-better needs --margin: how much higher the score has to be")
    if (data is None) == (endpoint is None):
        raise click.UsageError("--if-better needs --endpoint or --data, and one of them: where the requests are")
    if config and data is None:
        raise click.UsageError("-C goes with --data; answers of a payload log have been given")
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells which model is active, and what it traces
    settings = engine_overrides(config, here=True)
    loaded = [scorer_of(name, judge) for name in scorers]
    names = [one.name for one in loaded]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise click.UsageError(f"--scorer: two scorers are called {again!r}")
    if planned.current == planned.candidate:
        _tell(planned, {"decision": "unchanged", "reason": f"it names version {planned.candidate} already"}, as_json)
        return
    other = _compared_with(planned, against)
    use_judge(judge, url)
    if data is not None:
        uris = (uri_of(planned.name, other), uri_of(planned.name, planned.candidate))
        pairs = predicted(examples_of(data), *uris, settings)
    else:
        assert endpoint is not None
        versions = (f"{planned.name}/{other}", f"{planned.name}/{planned.candidate}")
        pairs = logged_pairs(Client(url, key), endpoint, *versions)
    parameters = {
        "candidate": uri_of(planned.name, planned.candidate),
        "current": uri_of(planned.name, other),
        "alias": alias,
        "margin": margin,
        "confidence": confidence,
        "min_requests": min_requests,
        "scorers": ", ".join(scorers),
        "judge": judge,
        "source": f"endpoint {endpoint}" if data is None else f"data {data}",
    }
    with evaluation_run(experiment, f"promote {planned.name}/{planned.candidate} to {alias}") as run:
        found = evaluate(planned, pairs, loaded, parameters, dry_run=dry_run)
    _tell(planned, {**found, "run_id": run.info.run_id}, as_json)
    context.exit(NOT_BETTER if found["decision"] == "not_better" else 0)


def evaluate(
    planned: Move, pairs: Sequence[Pair], scorers: list[Any], parameters: dict[str, Any], *, dry_run: bool
) -> dict[str, Any]:
    """Score the pairs in the active run, decide, and move the alias. Raises ``ClickException`` if too few pairs can be
    compared."""
    import mlflow

    mlflow.log_params({name: value for name, value in parameters.items() if value is not None})
    complete = [pair for pair in pairs if pair.is_complete]
    failures = [pair for pair in pairs if pair.is_failure]
    mlflow.log_metrics({"requests": len(pairs), "answered": len(complete), "candidate_failures": len(failures)})
    least: int = parameters["min_requests"]
    if not failures:
        _check_enough(len(complete), least, "answered by both versions", [_why(pair) for pair in pairs])
    elif len(complete) < 2:
        raise click.ClickException(f"the candidate failed at {len(failures)} requests: {_why(failures[0])}")
    current = score(complete, scorers, of="current", uri=parameters["current"])
    candidate = score(complete, scorers, of="candidate", uri=parameters["candidate"])
    numbers = scored(current, candidate)
    mlflow.log_metric("scored", len(numbers))
    _check_enough(
        len(numbers), 2 if failures else least, "scored for both versions", [*candidate.problems, *current.problems]
    )
    confidence = parameters["confidence"]
    evaluated = compared(numbers.values(), confidence or DEFAULT_CONFIDENCE)
    log_evaluation(evaluated, complete, current, candidate)
    decision = decide(
        evaluated.overall, parameters["margin"], needs_bound=confidence is not None, failures=len(failures)
    )
    reason = decision.reason + (f"; first: {_why(failures[0])}" if failures else "")
    if decision.is_better and not dry_run:
        move(planned)
    said = log_decision(dataclasses.replace(decision, reason=reason), dry_run=dry_run)
    return {
        "decision": said,
        "reason": reason,
        "requests": len(pairs),
        "scored": len(numbers),
        "candidate_failures": len(failures),
        **dataclasses.asdict(evaluated),
    }


def use_judge(judge: str | None, url: str) -> None:
    """Let judges by endpoints:/… ask the server at ``url``, unless MLflow has a target for them already."""
    if judge is None or not judge.startswith("endpoints:/"):
        return
    from mlflow.deployments import get_deployments_target, set_deployments_target
    from mlflow.exceptions import MlflowException

    try:
        get_deployments_target()
    except MlflowException:
        try:
            set_deployments_target(url)
        except MlflowException as error:
            raise click.UsageError(f"--judge {judge}: --url {url}: {error.message}") from None


def _compared_with(planned: Move, against: str | None) -> str:
    if against is not None:
        check_version(planned.name, against)
        if against == planned.candidate:
            raise click.UsageError(f"--against {against}: it is the candidate itself")
        return against
    if planned.current is None:
        raise click.ClickException(
            f"{planned.name} has no alias {planned.alias!r}, so there is nothing to compare with; name a version with "
            "--against, or leave --if-better out"
        )
    return planned.current


def _check_enough(found: int, least: int, what: str, problems: Sequence[str]) -> None:
    if found >= least:
        return
    first = next(filter(None, problems), "")
    raise click.ClickException(
        f"--min-requests: {found} requests were {what}, fewer than {least}{f' ({first})' if first else ''}"
    )


def _why(pair: Pair) -> str:
    """Return why a pair is not complete; "" if it is."""
    for what, outcome in (("candidate", pair.candidate), ("current version", pair.current)):
        if not outcome.is_answer:
            return f"{pair.name}, {what}: {outcome.status}: {outcome.error[:300] or 'no text'}"
    return ""


def _refuse_evaluation(context: click.Context) -> None:
    """Raise ``UsageError`` for options that only an evaluation has."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in OF_AN_EVALUATION and source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} goes with --if-better; without it, the alias is moved at once")


def _moved(planned: Move, *, dry_run: bool, as_json: bool) -> None:
    same = planned.current == planned.candidate
    decision = "unchanged" if same else "would_promote" if dry_run else "promoted"
    if decision == "promoted":
        move(planned)
    _tell(planned, {"decision": decision, "reason": "no evaluation was asked for"}, as_json)


def _tell(planned: Move, found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        names = {
            "name": planned.name,
            "alias": planned.alias,
            "previous": planned.current,
            "candidate": planned.candidate,
        }
        click.echo(json.dumps(names | found, indent=2))
        return
    verbs = {
        "promoted": planned.text,
        "would_promote": f"{planned.text} (not moved: --dry-run)",
        "not_better": f"{planned.name}@{planned.alias} stays at {planned.current or 'nothing'}",
        "unchanged": f"{planned.name}@{planned.alias} is {planned.candidate} already",
    }
    click.echo(verbs[found["decision"]])
    if "run_id" in found:
        click.echo(found["reason"])
        for name, one in found["by_scorer"].items():
            click.echo(f"  {name}: {one['current']:.4g} → {one['candidate']:.4g}")
        click.echo(f"run {found['run_id']}")
