"""Downloads of ``mlflow.pyfunc.load_model``, which MLflow leaves in a temporary directory for ever, go to the cache.

MLflow calls the flavor's loader with the path of that directory alone. Whether the directory is this load's own, and
nobody else's, can be seen in the call of ``mlflow.pyfunc.load_model``, which is on the stack: it was given a URI and no
``dst_path``. MLflow's commands and Spark download a model in one process and load it in others; those are left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from types import FrameType

import psutil

from ....serving.model_files.model_uri import is_path
from ..model import manifest as manifests
from ..model.download import taken_over
from ..model.fetch import is_local

CALLER = "mlflow.pyfunc"
MAX_FRAMES = 8  # between MLflow's call and this module, at most


def settled(root: Path) -> Path:
    """Return the root of the model that MLflow asks to load from ``root``.

    A download of MLflow's that only this load knows of is moved to the cache of downloads. Its small files, to which
    MLflow may return (code, examples), are removed when this process ends. If the cache cannot be written, the model
    is loaded from where it is. Raises ``PackagingError`` if the model is damaged.
    """
    if not _is_own_download(root):
        return root
    atexit.register(_remove, root)
    try:
        found = taken_over(root)
    except OSError:
        return root
    for path in manifests.read(found).files:
        with contextlib.suppress(OSError):
            (root / path).unlink()
    return found


def loaded_uri(root: Path) -> str:
    """Return the URI that ``mlflow.pyfunc.load_model``, which asks to load ``root``, was given; "" if not known."""
    call = _call()
    return "" if call is None or call.f_locals.get("local_path") != str(root) else str(call.f_locals.get("model_uri"))


def _is_own_download(root: Path) -> bool:
    call = _call()
    if call is None or call.f_locals.get("dst_path") is not None or call.f_locals.get("local_path") != str(root):
        return False
    return _was_made_now(root) and _is_remote(str(call.f_locals.get("model_uri")))


def _call() -> FrameType | None:
    """Return the frame of ``mlflow.pyfunc.load_model`` that this is called from."""
    frame: FrameType | None = sys._getframe()
    for _ in range(MAX_FRAMES):
        frame = frame and frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == CALLER and frame.f_code.co_name == "load_model":
            return frame
    return None


def _was_made_now(root: Path) -> bool:
    """Return whether ``root`` is in a temporary directory that this process can have made: a download, or a local
    store."""
    top = next((path for path in (root, root.parent) if path.name.startswith(tempfile.gettempprefix())), None)
    if top is None:
        return False
    found = top.stat()
    private = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
    return private and found.st_ctime >= psutil.Process().create_time()


def _is_remote(uri: str) -> bool:
    """Return whether MLflow copies a model at ``uri`` instead of returning its path."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if is_path(uri):
        return False
    try:
        return not is_local(get_artifact_repository(uri))
    except Exception:  # from a store's client: better leave a copy than remove what is none
        return False


def _remove(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    if not root.name.startswith(tempfile.gettempprefix()):
        with contextlib.suppress(OSError):
            root.parent.rmdir()
