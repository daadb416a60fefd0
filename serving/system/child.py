"""Start child Python processes: every part of the package that starts one uses this module.

A child imports the installed package, never one that happens to be in its working directory: ``python -m`` puts that
directory first on the path, and a checkout of the sources, which has no compiled kernels, would run instead of the
installed package. If the package is not installed, the child gets this process's own.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import site
import subprocess
import sys
from pathlib import Path

from .files import PLACE_VARIABLES

logger = logging.getLogger(__name__)

PACKAGE = __name__.partition(".")[0]
KERNELS = Path("serving", "engine", "native", "_native.so")
FAREWELL = b"farewell\n"  # to a child that would otherwise take the end of its standard input for its parent's death
LINKS = "package"  # a folder with nothing but a link to this package
OF_THIS_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
FIND = f"import importlib.util; found = importlib.util.find_spec({PACKAGE!r}); print(found.origin if found else '')"


def python_command(module: str, *words: str, flags: tuple[str, ...] = (), python: str | None = None) -> list[str]:
    """Return the command ``python -P -m PACKAGE.module words``, to be run with ``environment()``, or, by another
    interpreter, with ``lean_environment()``."""
    return [python or sys.executable, "-P", *flags, "-m", f"{PACKAGE}.{module}", *words]


def environment() -> dict[str, str]:
    """Return this process's environment for a child.

    It has the package's directory on the path if a child would not find the package otherwise, and directories in a
    form that is valid in another working directory.
    """
    found = dict(os.environ)
    found |= {name: os.path.abspath(found[name]) for name in PLACE_VARIABLES if found.get(name)}
    paths = [os.path.abspath(path) for path in found.get("PYTHONPATH", "").split(os.pathsep) if path]
    place = package_place()
    if place not in (*_installed_places(), *paths[:1]):
        paths = [place, *paths]
    if paths:
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return found


def lean_environment(folder: str) -> dict[str, str]:
    """Return this process's environment for a child that is run by another interpreter.

    The child finds this package through a link in ``folder``, and nothing else that is installed here: the interpreter
    has packages of its own, of other versions. Raises ``OSError`` if the link cannot be made.
    """
    found = {name: value for name, value in os.environ.items() if name not in OF_THIS_INTERPRETER}
    found |= {name: os.path.abspath(found[name]) for name in PLACE_VARIABLES if found.get(name)}
    path = os.path.join(folder, LINKS)
    os.makedirs(path, mode=0o700, exist_ok=True)
    link, place = os.path.join(path, PACKAGE), os.path.join(package_place(), PACKAGE)
    if os.path.realpath(link) != os.path.realpath(place):
        draft = f"{link}.{os.getpid()}.new"
        os.symlink(place, draft)
        os.replace(draft, link)
    found["PYTHONPATH"] = path
    return found


def package_place() -> str:
    """Return the directory from which children import the package: this process's own, unless that is a checkout in the
    working directory and the same code is also installed with kernels."""
    return _place(os.environ.get("PYTHONPATH", ""))


@functools.cache
def _place(paths: str) -> str:
    own = own_place()
    if own in _installed_places() or _has_kernels(own):
        return own
    installed = _found_by_children()
    if installed is None or installed == own or not _has_kernels(installed):
        return own
    if _code(installed) == _code(own):
        logger.warning("engines run %s, whose kernels are compiled, instead of the same code in %s", installed, own)
        return installed
    logger.warning("%s has no compiled kernels and hides %s, which has: PYTHONSAFEPATH=1 avoids it", own, installed)
    return own


def own_place() -> str:
    """Return the directory from which this process has imported the package."""
    return os.path.dirname(os.path.dirname(os.path.abspath(sys.modules[PACKAGE].__file__ or "")))


def _installed_places() -> tuple[str, ...]:
    return (*site.getsitepackages(), site.getusersitepackages())


def _found_by_children() -> str | None:
    """Return where a child finds the package by itself. A child is started to ask: editable installs count too."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", FIND]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", check=False)
    origin = done.stdout.strip()
    return os.path.dirname(os.path.dirname(origin)) if origin else None


def _has_kernels(place: str) -> bool:
    return Path(place, PACKAGE, KERNELS).is_file()


def _code(place: str) -> str:
    """Return the SHA-256 over the package's Python files."""
    found = hashlib.sha256()
    root = Path(place, PACKAGE)
    for directory, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(name for name in files if name.endswith(".py")):
            path = Path(directory, name)
            found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()
