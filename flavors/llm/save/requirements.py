"""A saved model's Python requirements: exact versions of what is installed, and the project's own wheel.

The list is explicit: MLflow's inference would load the whole model in another process to see what it imports.
The private names of ``mlflow.utils.environment`` are used only here.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from mlflow.utils.environment import (
    _CONDA_ENV_FILE_NAME,
    _CONSTRAINTS_FILE_NAME,
    _PYTHON_ENV_FILE_NAME,
    _REQUIREMENTS_FILE_NAME,
    _mlflow_conda_env,
    _process_pip_requirements,
    _PythonEnv,
    _validate_env_arguments,
)
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ....serving.interface.errors import PackagingError, shown
from .wheel import DISTRIBUTION, distribution, write_wheel

CONDA_ENV = _CONDA_ENV_FILE_NAME
PYTHON_ENV = _PYTHON_ENV_FILE_NAME
REQUIREMENTS = _REQUIREMENTS_FILE_NAME
# Packages that some tokenizers need; pinned if they are installed.
TOKENIZER_PACKAGES = ("tokenizers", "sentencepiece", "tiktoken", "protobuf")

Requirements = list[str] | str | None


def get_default_pip_requirements(*, images: bool = False) -> list[str]:
    """Return ``name==version`` for each installed dependency, mlflow first, without mlflow-llm itself.

    With ``images``, what decodes them is one of the dependencies."""
    needed = [Requirement(line) for line in distribution().requires or ()]
    names = [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    extra = ("pillow",) if images else ()
    return [pin for name in [*names, *TOKENIZER_PACKAGES, *extra] if (pin := _pinned(name)) is not None]


def get_default_conda_env() -> dict[str, Any]:
    """Return a conda environment of Python, pip and ``get_default_pip_requirements``, as other MLflow flavors do."""
    return _mlflow_conda_env(additional_pip_deps=get_default_pip_requirements(), install_mlflow=False)


def write_environment(
    root: Path,
    *,
    pip_requirements: Requirements,
    extra_pip_requirements: Requirements,
    conda_env: Any = None,
    images: bool = False,
) -> None:
    """Write requirements.txt, python_env.yaml, conda.yaml and the wheel under the model ``root``.

    ``pip_requirements`` replaces the list, ``extra_pip_requirements`` adds to it, and the pip part of ``conda_env`` (a
    dict or the path of a YAML file) replaces it too. The wheel and its two lines are added unless the list names
    mlflow-llm itself: nothing could load the model without it. ``images`` says that the model reads them.
    """
    try:
        _validate_env_arguments(conda_env, pip_requirements, extra_pip_requirements)
    except ValueError as error:
        raise PackagingError(str(error)) from None
    try:
        conda, lines, constraints = _process_pip_requirements(
            get_default_pip_requirements(images=images),
            pip_requirements or _pip_lines(conda_env),
            extra_pip_requirements,
        )
    except (InvalidRequirement, OSError, TypeError) as error:
        raise PackagingError(f"pip requirements: {error}") from None
    if not any(_name(line) == DISTRIBUTION for line in lines):
        # Relative to requirements.txt (as pip and uv resolve it), so it is valid wherever the model is stored.
        lines = [f"--find-links {write_wheel(root)}", *lines, f"{DISTRIBUTION}=={distribution().version}"]
    _write_files(root, lines, constraints, conda)


def check_requirements(*, pip_requirements: Requirements, extra_pip_requirements: Requirements, conda_env: Any) -> None:
    """Allow packages only by name and version. Raises ``PackagingError`` naming any other line.

    A file, URL or index in a model would decide which code runs where the model is served. Whoever builds the
    environment chooses the index.
    """
    for given in (pip_requirements, extra_pip_requirements, _pip_lines(conda_env)):
        _check_lines(given)


def _check_lines(given: Requirements) -> None:
    if given is None:
        return
    try:
        lines = Path(given).read_text().splitlines() if isinstance(given, str) else list(given)
    except (OSError, UnicodeDecodeError) as error:
        raise PackagingError(f"pip requirements: {shown(given)} cannot be read: {type(error).__name__}") from None
    for line in lines:
        plain = re.sub(r"(^|\s)#.*", "", str(line)).strip()
        if not plain:
            continue
        if plain.startswith(("-c ", "--constraint")):
            _check_lines(re.split(r"[\s=]+", plain, maxsplit=1)[1])
        elif plain.startswith("-") or "://" in plain or _is_direct(plain):
            raise PackagingError(
                f"pip requirements: {shown(plain)} is not allowed; expected a package's name and version"
                " (index and credentials belong to where the environment is built: PIP_INDEX_URL)"
            )


def _is_direct(line: str) -> bool:
    """Return whether a line is a file or a direct reference instead of a package name."""
    try:
        return Requirement(line.partition(" --")[0]).url is not None
    except InvalidRequirement:
        return True


def _write_files(root: Path, lines: list[str], constraints: list[str], conda: dict[str, Any]) -> None:
    conda["dependencies"] = [d if isinstance(d, str) else {"pip": lines} for d in conda["dependencies"]]
    (root / CONDA_ENV).write_text(yaml.safe_dump(conda, default_flow_style=False))
    (root / _REQUIREMENTS_FILE_NAME).write_text("\n".join(lines) + "\n")
    if constraints:
        (root / _CONSTRAINTS_FILE_NAME).write_text("\n".join(constraints) + "\n")
    _PythonEnv.current().to_yaml(str(root / PYTHON_ENV))


def _pip_lines(conda_env: Any) -> list[str] | None:
    """Return the pip part of a conda environment; its conda packages cannot be kept alongside a pinned torch."""
    if conda_env is None:
        return None
    try:
        parsed = conda_env if isinstance(conda_env, dict) else yaml.safe_load(Path(conda_env).read_text())
        return [line for d in parsed["dependencies"] if isinstance(d, dict) for line in d["pip"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        raise PackagingError("conda_env: expected a dict or the path of a YAML file with dependencies") from None


def _pinned(name: str) -> str | None:
    """Return ``name==version`` without a local label (``+cpu``), which no index has; None if it is not installed."""
    try:
        return f"{name}=={Version(importlib.metadata.version(name)).public}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _name(line: str) -> str | None:
    try:
        return canonicalize_name(Requirement(line).name)
    except InvalidRequirement:
        return None
