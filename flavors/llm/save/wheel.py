"""The project's own wheel, built from the running package, so that a model loads where no index has mlflow-llm.

A wheel is a zip file of the package's files and metadata (PEP 427). Both are available however the package was
installed (wheel or editable), so the wheel is written directly: no build tool, no network, the same bytes every time.

The wheel includes the native kernels if they were built. They are optional: if they do not fit the CPU or the
system, the package runs without them, so the wheel is still tagged for any platform.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ....serving.interface.errors import PackagingError

DISTRIBUTION = "mlflow-llm"
PACKAGE = "mlflow_llm"
WHEELS = "wheels"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold; with a fixed time, equal content gives equal files
WHEEL_FILE = "Wheel-Version: 1.0\nGenerator: mlflow-llm\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def distribution() -> importlib.metadata.Distribution:
    """Return the installed distribution of mlflow-llm. Raises ``PackagingError`` if the package is only on Python's
    path."""
    try:
        return importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise PackagingError(f"{DISTRIBUTION} is not installed (only on the path); install it with pip first") from None


def write_wheel(root: Path) -> str:
    """Write ``wheels/<hash>/mlflow_llm-<version>-py3-none-any.whl`` under ``root`` and return ``wheels/<hash>``.

    The hash is of the content. MLflow names an environment by the text of its requirements, so two different builds of
    one version (from a source tree under development) do not share an environment.
    """
    name, data = built_wheel(_stamp())
    folder = f"{WHEELS}/{name}"
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / folder / f"{PACKAGE}-{distribution().version}-py3-none-any.whl").write_bytes(data)
    return folder


def _stamp() -> tuple[object, ...]:
    """Return a value that changes with any file of the package and with the installed distribution."""
    found = distribution()
    files = ((path, os.stat(path)) for _, path in package_paths())
    return (found.version, str(found.locate_file("")), *((path, s.st_mtime_ns, s.st_size) for path, s in files))


@functools.lru_cache(maxsize=1)
def built_wheel(stamp: tuple[object, ...]) -> tuple[str, bytes]:
    """Return the content hash and the wheel. It is cached: a process that saves many models packs it once."""
    content = dict(_files(distribution()))
    digest = hashlib.sha256()
    for name, data in content.items():
        digest.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    return digest.hexdigest()[:12], _zip(content)


def _files(dist: importlib.metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield the path in the wheel and the bytes of every file of the package and its metadata; RECORD comes last."""
    content = dict(_package_files()) | dict(_metadata_files(dist))
    yield from content.items()
    record = f"{_dist_info(dist)}/RECORD"
    lines = [f"{name},sha256={_record_hash(data)},{len(data)}" for name, data in content.items()]
    yield record, "\n".join([*lines, f"{record},,", ""]).encode()


def _package_files() -> Iterator[tuple[str, bytes]]:
    return ((name, path.read_bytes()) for name, path in package_paths())


def package_paths() -> Iterator[tuple[str, Path]]:
    import mlflow_llm

    package = Path(mlflow_llm.__file__).parent
    # plugin, flavors and serving are symbolic links in a source tree, and folders in an installed package
    for folder, folders, files in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(files):
            if not name.endswith((".pyc", ".pyo")) and not name.startswith("."):
                file = Path(folder, name)
                yield f"{PACKAGE}/{file.relative_to(package).as_posix()}", file


def _metadata_files(dist: importlib.metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    # PKG-INFO: for Python started in a source tree in which a build has left its metadata
    metadata = dist.read_text("METADATA") or dist.read_text("PKG-INFO")
    for name, text in (("METADATA", metadata), ("entry_points.txt", dist.read_text("entry_points.txt"))):
        if text is not None:
            yield f"{_dist_info(dist)}/{name}", text.encode()
    for file in sorted(dist.files or (), key=str):
        for kind in ("licenses", "sboms"):
            if f".dist-info/{kind}/" in file.as_posix():
                yield f"{_dist_info(dist)}/{kind}/{file.name}", file.read_binary()
    yield f"{_dist_info(dist)}/WHEEL", WHEEL_FILE.encode()


def _dist_info(dist: importlib.metadata.Distribution) -> str:
    return f"{PACKAGE}-{dist.version}.dist-info"


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zip(content: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return packed.getvalue()
