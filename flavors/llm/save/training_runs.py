"""The MLflow runs that trained adapters, found where nobody names them.

Transformers' ``Trainer`` logs its ``output_dir`` as a param of its run. An adapter in such a directory is of the last
run with that directory which began before its weights were written. Any other adapter is of the run that logs it, if
that run has metrics or datasets, and, of a directory, if the weights were written since it began.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from ....serving.interface.errors import reason
from .adapters import PICKLED_WEIGHTS, WEIGHTS

logger = logging.getLogger(__name__)

OF_TRAINER = "training_args.bin"  # what Trainer leaves beside every checkpoint
MAX_RUNS = 20  # with one output directory are looked at


def training_runs(adapters: Mapping[str, Any], run_id: str | None) -> dict[str, str]:
    """Return the ids of the runs that trained ``adapters`` (peft models, or directories), as far as they are found.

    ``run_id`` is the run that logs them.
    """
    found: dict[str, str] = {}
    try:
        logging_run = None if run_id is None else MlflowClient().get_run(run_id)
        for name, source in adapters.items():
            run = _run_of(source, logging_run)
            if run is not None:
                found[name] = run.info.run_id
    except MlflowException as error:
        logger.warning("the runs that trained the adapters were not looked for: %s", reason(error))
    return found


def _run_of(source: Any, logging_run: Run | None) -> Run | None:
    if not isinstance(source, str | os.PathLike):
        return logging_run if logging_run is not None and _has_trained(logging_run) else None
    directory = Path(source).expanduser()
    written = _written(directory)
    if written is None:
        return None
    if (directory / OF_TRAINER).is_file() and (run := _of_trainer(directory, written, logging_run)) is not None:
        return run
    if logging_run is None or written < logging_run.info.start_time or not _has_trained(logging_run):
        return None
    return logging_run


def _of_trainer(directory: Path, written: float, logging_run: Run | None) -> Run | None:
    """Return the run whose params name ``directory``, or the one above it, as ``output_dir``."""
    experiments = None if logging_run is None else [logging_run.info.experiment_id]
    for place in _spellings(directory):
        if "'" in place:  # a filter has no way to write it
            continue
        runs: Any = mlflow.search_runs(
            experiment_ids=experiments,
            filter_string=f"params.output_dir = '{place}'",
            order_by=["start_time DESC"],
            max_results=MAX_RUNS,
            output_format="list",
        )
        for run in runs:
            if run.info.start_time <= written:
                found: Run = run
                return found
    return None


def _spellings(directory: Path) -> Iterator[str]:
    """Yield the texts by which a caller may have named the directory, or the one of which it is a checkpoint."""
    for one in (directory.absolute(), directory.absolute().parent):
        relative = os.path.relpath(one)
        yield from (str(one), relative, f"./{relative}")


def _has_trained(run: Run) -> bool:
    return bool(run.data.metrics) or bool(run.inputs is not None and run.inputs.dataset_inputs)


def _written(directory: Path) -> float | None:
    """Return when the weights in ``directory`` were written, in milliseconds; None if there are none."""
    files = (directory / name for name in (WEIGHTS, PICKLED_WEIGHTS))
    return next((file.stat().st_mtime * 1000 for file in files if file.is_file()), None)
