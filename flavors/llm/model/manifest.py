"""``manifest.json``: what a saved model holds, with the size and SHA-256 of every file, checked when it is loaded.

The content hash is SHA-256 over the lines ``<path> <sha256 of the file>``, sorted by path: equal hashes mean equal
bytes, wherever they are stored. Sizes and the list of files are checked on every load. The files themselves are hashed
again on request (``verify="full"`` or ``MLFLOW_LLM_VERIFY=full``), which reads every byte. The files of the Python
environment (requirements and the project's own wheel) are recorded too and hashed on every load, but are not part of
the content hash.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from ....serving.interface.bundle import WEIGHTS, CrossEncoderSpec, EmbeddingSpec, ImageSpec
from ....serving.interface.errors import PackagingError, shown
from ....serving.interface.request import Task
from ....serving.interface.tool_format import ToolFormat
from .names import MLMODEL

FORMAT_VERSION = 4  # of models that read images
QUANTIZED_VERSION = 3
PLAIN_VERSION = 1  # the format version of models that earlier releases can serve too
MANIFEST = "manifest.json"
DEFAULT_TEMPLATE = "chat_template.jinja"
MODEL = "model/"
COVERED = ("model", "tokenizer", "adapters", "chat_templates", DEFAULT_TEMPLATE)
ENVIRONMENT = ("requirements.txt", "conda.yaml", "python_env.yaml", "constraints.txt", "wheels")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
WITH_LIBRARIES = re.compile(rb"^wheels:", re.MULTILINE)  # a key of MLmodel
VERIFY_VARIABLE = "MLFLOW_LLM_VERIFY"

Verify = Literal["size", "full"]


class FileEntry(Struct, frozen=True, kw_only=True):
    size: int
    sha256: str


class BaseReference(Struct, frozen=True, kw_only=True):
    """The registered base of an adapter that was logged alone, by URI and content hash."""

    uri: str
    content_hash: str


class Manifest(Struct, frozen=True, kw_only=True):
    """The content of a saved model.

    ``files`` are POSIX paths relative to the model root. ``base`` is set if ``model/`` belongs to another model.
    ``default_adapter`` answers requests that name no adapter. ``tool_formats`` says, by the name of the chat template,
    how tool calls are written. ``quantization`` is how the linears are stored, None if they are stored as they came.
    ``images`` says how prompts contain images, None if the model reads only text. ``environment`` holds the files
    of the Python environment, None if an earlier release saved the model.
    """

    format_version: int = PLAIN_VERSION
    content_hash: str
    tasks: tuple[Task, ...]
    files: dict[str, FileEntry]
    base: BaseReference | None = None
    default_adapter: str | None = None
    embedding: EmbeddingSpec | None = None
    cross_encoder: CrossEncoderSpec | None = None
    tool_formats: dict[str, ToolFormat] = {}
    quantization: str | None = None
    environment: dict[str, FileEntry] | None = None
    images: ImageSpec | None = msgspec.field(default=None, name="pictures")  # the old name, which stored models have

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters stored in this model."""
        return sorted({path.split("/")[1] for path in self.files if path.startswith("adapters/")})

    @property
    def model_hashes(self) -> dict[str, str]:
        """The SHA-256 of each file in ``model/``, by its path there."""
        return {path[len(MODEL) :]: entry.sha256 for path, entry in self.files.items() if path.startswith(MODEL)}

    @property
    def weight_bytes(self) -> int:
        """The size of all files of weights in ``model/``."""
        files = self.files.items()
        return sum(entry.size for path, entry in files if path.startswith(MODEL) and path.endswith(WEIGHTS))


def describe(
    root: Path,
    *,
    tasks: tuple[Task, ...],
    base: BaseReference | None = None,
    default_adapter: str | None = None,
    embedding: EmbeddingSpec | None = None,
    cross_encoder: CrossEncoderSpec | None = None,
    tool_formats: dict[str, ToolFormat] | None = None,
    quantization: str | None = None,
    images: ImageSpec | None = None,
) -> Manifest:
    """Create a manifest of the files under ``root``, reading each file once. Raises ``PackagingError``."""
    files = _entries(root, COVERED)
    return Manifest(
        content_hash=content_hash_of(files),
        tasks=tasks,
        files=files,
        base=base,
        default_adapter=default_adapter,
        embedding=embedding,
        cross_encoder=cross_encoder,
        tool_formats=tool_formats or {},
        quantization=quantization,
        images=images,
        format_version=_version(quantization, images),
    )


def _version(quantization: str | None, images: ImageSpec | None) -> int:
    """Return the oldest format version with what the model needs, so that releases without it refuse the model."""
    if images is not None:
        return FORMAT_VERSION
    return PLAIN_VERSION if quantization is None else QUANTIZED_VERSION


def with_environment(manifest: Manifest, root: Path) -> Manifest:
    """Return ``manifest`` with the files of the Python environment under ``root`` added."""
    return msgspec.structs.replace(manifest, environment=_entries(root, ENVIRONMENT))


def with_changed_environment(manifest: Manifest, root: Path, names: tuple[str, ...]) -> Manifest:
    """Return ``manifest`` with the files ``names`` of the Python environment as they are under ``root``."""
    if manifest.environment is None:
        return manifest
    return msgspec.structs.replace(manifest, environment=manifest.environment | _entries(root, names))


def write(manifest: Manifest, root: Path) -> None:
    (root / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1))


def read(root: Path) -> Manifest:
    """Parse the manifest under ``root``. Raises ``PackagingError`` if there is none or its format is a later one."""
    try:
        raw = (root / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise PackagingError(f"{MANIFEST} is missing in {root}: this is not a model saved by mlflow-llm") from None
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise PackagingError(f"{MANIFEST} cannot be read: {error}") from None
    if manifest.format_version > FORMAT_VERSION:
        raise PackagingError(
            f"{MANIFEST} has format version {manifest.format_version}; this release of mlflow-llm reads up to"
            f" {FORMAT_VERSION}: install a later one"
        )
    _check_paths(manifest)
    return manifest


def is_adapter_name(name: str) -> bool:
    """Return whether ``name`` is allowed for an adapter: it is a folder's name here, and part of
    ``endpoint:adapter``."""
    return ADAPTER_NAME.fullmatch(name) is not None and not name.endswith(".")


def _check_paths(manifest: Manifest) -> None:
    """Raise ``PackagingError`` for a path outside this package's layout, before any file is fetched or opened."""
    for path in (*manifest.files, *(manifest.environment or ())):
        top, *rest = path.split("/")
        plain = "\\" not in path and "\0" not in path and all(part not in ("", ".", "..") for part in rest)
        if top not in COVERED + ENVIRONMENT or not plain:
            raise PackagingError(f"{MANIFEST}: {shown(path)} is not the path of a file in a saved model")
    for name in manifest.adapters:
        if not is_adapter_name(name):
            raise PackagingError(f"{MANIFEST}: the adapter's name {shown(name)} is not allowed")


def is_weights(path: str) -> bool:
    """Return whether only an engine needs the file; a client of a remote engine does not."""
    return path.startswith(("model/", "adapters/")) and path.endswith(".safetensors")


def check(manifest: Manifest, root: Path, verify: Verify | None = None, *, weights: bool = True) -> None:
    """Compare the files under ``root`` with the manifest. Raises ``PackagingError`` naming the first that differs.

    A ``verify`` of None reads ``MLFLOW_LLM_VERIFY`` ("size" if unset). With ``weights=False`` the weight files may be
    missing.
    """
    chosen = verify or os.environ.get(VERIFY_VARIABLE) or "size"
    if chosen not in ("size", "full"):
        raise PackagingError(f'verify: {chosen!r} is not allowed; expected "size" or "full"')
    if content_hash_of(manifest.files) != manifest.content_hash:
        raise PackagingError(f"{MANIFEST} was changed: its content hash does not match its list of files")
    _check_environment(manifest.environment, root, weights=weights)
    present = set(_walk(root, COVERED))
    if extra := sorted(present - manifest.files.keys()):
        raise PackagingError(f"{extra[0]}: this file is not in {MANIFEST}; it was added after the model was saved")
    for path, entry in manifest.files.items():
        if path not in present:
            if not weights and is_weights(path):
                continue
            raise PackagingError(f"{path} is missing from the saved model")
        check_file(root / path, path, entry, full=chosen == "full")


def _check_environment(environment: dict[str, FileEntry] | None, root: Path, *, weights: bool) -> None:
    """Hash the environment's files, which are small and decide which code runs. Raises ``PackagingError``.

    With ``weights=False`` they may not have been fetched. Those of a version with libraries are not the ones that were
    saved.
    """
    if environment is None or has_libraries(root):
        return
    present = set(_walk(root, ENVIRONMENT))
    if extra := sorted(present - environment.keys()):
        raise PackagingError(f"{extra[0]}: this file is not in {MANIFEST}; it was added after the model was saved")
    for path, entry in environment.items():
        if path in present:
            check_file(root / path, path, entry, full=True)
        elif weights:
            raise PackagingError(f"{path} is missing from the saved model")


def has_libraries(root: Path) -> bool:
    """Return whether ``mlflow.models.add_libraries_to_model`` has made this version: MLflow wrote its environment
    anew."""
    try:
        return WITH_LIBRARIES.search((root / MLMODEL).read_bytes()) is not None
    except OSError:
        return False


def check_file(file: Path, path: str, entry: FileEntry, *, full: bool) -> None:
    """Raise ``PackagingError`` if ``file`` differs from the manifest: in its size or, if ``full``, its SHA-256."""
    size = file.stat().st_size
    if size != entry.size:
        raise PackagingError(f"{path} has {size} bytes, {MANIFEST} says {entry.size}: it was changed or cut short")
    if full and _sha256(file) != entry.sha256:
        raise PackagingError(f"{path} was changed: its SHA-256 is not the one in {MANIFEST}")


def _entries(root: Path, names: tuple[str, ...]) -> dict[str, FileEntry]:
    return {
        path: FileEntry(size=(root / path).stat().st_size, sha256=_sha256(root / path)) for path in _walk(root, names)
    }


def _walk(root: Path, names: tuple[str, ...]) -> Iterator[str]:
    """Yield relative paths of all files in the folders ``names``, except hidden ones (of desktops or network storage).

    Raises ``PackagingError`` for a symbolic link that leaves the model: it could point at any file on this machine.
    """
    whole = root.resolve()
    for name in names:
        top = root / name
        if top.is_symlink() and not top.resolve().is_relative_to(whole):
            raise PackagingError(f"{name} is a symbolic link that leaves the model; it is not followed")
        if top.is_file():
            yield name
        for file in sorted(top.rglob("*")) if top.is_dir() else ():
            relative = file.relative_to(root)
            if file.is_symlink() and not file.resolve().is_relative_to(whole):
                raise PackagingError(f"{relative} is a symbolic link that leaves the model; it is not followed")
            if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                yield relative.as_posix()


def content_hash_of(files: dict[str, FileEntry]) -> str:
    lines = "".join(f"{path} {files[path].sha256}\n" for path in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
