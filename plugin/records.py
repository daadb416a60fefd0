"""Records of deployments: ``<state>/deployments/<name>.json``, each with a lock of its own.

A running server itself reports what it serves. The record holds the config that it was started with and the one
requested last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from mlflow_llm.serving.control.settings import default_state_dir
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.settings import check_name as endpoint_name
from mlflow_llm.serving.system.file_locks import acquire, try_acquire
from mlflow_llm.serving.system.files import STATE_VARIABLE, replace_file

from .processes import Birth


class Record(Birth, frozen=True, kw_only=True):
    """The record of a deployment.

    ``config`` is the whole config. ``base`` holds the engine settings on the server's command line, which apply unless
    later ones override them (None in files of earlier releases). ``starting`` means that the process that started the
    server has not seen it ready yet. The stores are those of MLflow in which the server finds models (empty in files of
    earlier releases).
    """

    name: str
    model_uri: str
    config: dict[str, Any]
    url: str
    base: dict[str, Any] | None = None
    tracking_uri: str = ""
    registry_uri: str = ""
    starting: bool = False


def directory() -> Path:
    """Return the directory of the records. Raises ``MlflowException`` if it cannot be created."""
    try:
        path = (default_state_dir() / "deployments").absolute()
    except OSError as error:
        raise MlflowException(str(error)) from None
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _unusable(path, error) from None
    return path


def _unusable(path: Path, error: OSError) -> MlflowException:
    return MlflowException(
        f"the state directory {path} cannot be used ({error.strerror}); name another in {STATE_VARIABLE}"
    )


def _remake() -> None:
    directory()


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of a deployment, so that changes are made one at a time across processes."""
    path = _lock_path(name)
    try:
        lock = acquire(str(path), make_parent=_remake)
    except OSError as error:
        raise _unusable(path.parent, error) from None
    try:
        yield
    finally:
        lock.release()


def _lock_path(name: str) -> Path:
    return directory() / f".{name}.lock"


def check_name(name: Any) -> str:
    try:
        return endpoint_name(name)
    except InvalidField as error:
        raise MlflowException.invalid_parameter_value(error.message) from None


def read(name: str) -> Record:
    """Read a record. Raises ``MlflowException`` for an unknown deployment, or for a file that is not a record."""
    path = directory() / f"{check_name(name)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        raise MlflowException(f"no deployment is called {name!r}", error_code=RESOURCE_DOES_NOT_EXIST) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MlflowException(f"the record {path} cannot be read ({error}); `delete` removes it") from None


def names() -> list[str]:
    found = []
    for path in directory().glob("*.json"):
        with contextlib.suppress(MlflowException):
            found.append(check_name(path.stem))
    return sorted(found)


def write(record: Record) -> None:
    path = directory() / f"{record.name}.json"
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(record), indent=1))
    except OSError as error:
        raise _unusable(path.parent, error) from None


def exchange(old: Record, new: Record) -> None:
    """Compare and swap: write ``new`` if ``old`` is still current and no change of the deployment is in progress."""
    with contextlib.suppress(OSError, MlflowException):
        lock = try_acquire(str(_lock_path(old.name)))
        if lock is None:
            return
        try:
            if read(old.name) == old:
                write(new)
        finally:
            lock.release()


def log_of(name: str) -> Path:
    return directory() / f"{name}.log"


def remove(name: str, *, log: bool = True) -> None:
    for path in (directory() / f"{name}.json", *([log_of(name)] if log else [])):
        path.unlink(missing_ok=True)
