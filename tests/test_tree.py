"""The tree of the package: the size of its folders, their sentences, their layers, and the page that lists them."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import mlflow_llm

ROOT = Path(__file__).parents[1]
PACKAGE = Path(mlflow_llm.__file__).parent
MIN_ENTRIES = 4  # files with ``__init__.py``, and packages
MAX_MODULES = 20  # files beside ``__init__.py``
NATIVE = "serving/engine/native/"  # its folders of headers are no packages
SOURCES = any((PACKAGE / NATIVE).rglob("*.h"))
pytestmark = pytest.mark.skipif(not SOURCES, reason="needs the sources: tests/run.sh runs it from them")

# Folders of another size, and why.
SMALL: Mapping[str, str] = {
    "flavors": "MLflow's name space of flavors, of which this project has one",
    "serving/dialects/openvino": "a dialect is a folder; this one is OpenAI's but for some fields and the errors",
    "serving/engine/native/sampling": "a sampler and the index of prompt continuations, each one header",
}
LARGE: Mapping[str, str] = {
    "flavors/llm/save": "each file finds, checks or converts one part of a model, and save_model.py is their order",
    "serving/metering/migrations/versions": "Alembic reads the revisions of a schema from one folder, a file each",
}

# Packages without layers, and why.
UNLAYERED: Mapping[str, str] = {
    "flavors": "the contract of all packages has its one package",
    "serving": "the contract of all packages has its packages",
    "serving/http/page": "one module, which no other may import, and files",
    "serving/metering/migrations/versions": "Alembic loads the revisions, whose names cannot be imported",
}

# Helpers that read private names, whose docstrings say why.
INSIDERS = ("internals.py", "rewrite_asserts.py", "serving/metering/ledger_rows.py", "stores.py")
PATCHES = ("setattr", "getattr", "hasattr", "delattr")
EXPECTS = re.compile(r"(assert|check|expect)|(raises|warns|fail|deprecated_call)$")  # called by tests that assert by it
# Names of libraries that begin with an underscore and are for their callers, or have no other way.
LIBRARIES: Mapping[str, str] = {
    "_exit": "os: the end of a forked process",
    "_replace": "typing.NamedTuple: a copy with other values",
    "_repr_html_": "Jupyter: a table in a notebook",
    "_ipython_display_": "Jupyter: how a stream is displayed",
    "_load_pyfunc": "MLflow: what a flavor's loader module has to have",
    "_validate_prediction_input": "MLflow: where it drops fields, which the flavor replaces",
    "_enforce_schema": "MLflow: what it makes of an input",
    "_download_wheels": "MLflow: the step of WheeledModel that needs a network",
    "_deployments_target": "MLflow: the target of a process, which no call resets",
    "_attn_implementation": "transformers: the attention of a loaded model",
    "_request_id": "anthropic: the id of a request, which its documentation names so",
}


def packages() -> Iterator[tuple[str, Path]]:
    """Yield the folders of the package with their paths below it, without caches and what npm reads and writes."""
    for top in ("flavors", "plugin", "serving"):
        base = PACKAGE / top
        for path in [base, *sorted(base.rglob("*"))]:
            name = (Path(top) / path.relative_to(base)).as_posix()
            has_headers = path.is_dir() and name.startswith(NATIVE) and path.name != "__pycache__"
            if has_headers or (path / "__init__.py").is_file():
                yield name, path


def modules(path: Path) -> list[str]:
    """Return the names of the source files of a folder beside ``__init__.py``."""
    ignored = {".pyc", ".pyo", ".so"}
    return [one.name for one in path.iterdir() if one.is_file() and one.suffix not in ignored | {""}]


def test_a_folder_has_four_to_twenty_files() -> None:
    """Each folder has at least 4 entries and at most 20 files beside its ``__init__``, or its reason stands above."""
    small, large = set(), set()
    for name, path in packages():
        files = modules(path)
        folders = [one for one in path.iterdir() if one.is_dir() and (one / "__init__.py").is_file()]
        if len(files) + len(folders) < MIN_ENTRIES:
            small.add(name)
        if len([file for file in files if file != "__init__.py"]) > MAX_MODULES:
            large.add(name)
    assert small == SMALL.keys()
    assert large == LARGE.keys()


def test_a_package_has_one_sentence() -> None:
    """The docstring of each package begins with a paragraph that ends with a full stop, and is at most 240 long."""
    found = []
    for name, path in packages():
        if not (path / "__init__.py").is_file():
            continue
        text = ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8"))) or ""
        first = text.partition("\n\n")[0]
        if not first.endswith(".") or len(first) > 240:
            found.append(f"{name}: {first[:60]!r}")
    assert not found, "\n".join(found)


def contracts() -> list[configparser.SectionProxy]:
    """Return the sections of ``.importlinter`` that say which layers there are."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter", encoding="utf-8")
    return [parser[name] for name in parser.sections() if parser[name].get("type") == "layers"]


def test_each_package_has_layers() -> None:
    """Each package has a contract that names all of its modules, and no import is exempt from any contract.

    The names are checked by ``lint-imports``, as each contract is exhaustive; those of all packages are checked here,
    as they have no common container.
    """
    assert "ignore_imports" not in (ROOT / ".importlinter").read_text(encoding="utf-8")
    layered = {one["containers"].removeprefix("mlflow_llm."): one for one in contracts() if "containers" in one}
    assert {name for name, one in layered.items() if not one.getboolean("exhaustive")} == set()
    known = {name.replace("/", ".") for name, path in packages() if (path / "__init__.py").is_file()}
    assert known - layered.keys() == {name.replace("/", ".") for name in UNLAYERED}
    (tops,) = (one for one in contracts() if "containers" not in one)
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    children = {name for name in known if re.fullmatch(r"plugin|flavors|serving\.[a-z_]+", name)}
    assert {name.removeprefix("mlflow_llm.") for name in re.findall(r"[\w.]+", tops["layers"])} == modules | children


def test_the_tour_names_each_folder() -> None:
    """``docs/structures.md`` has a row for each package, in the table of packages or in that of its folders."""
    page = (ROOT / "docs/structures.md").read_text(encoding="utf-8")
    floors, folders = page.split("## Level 2")[1].split("## Level 3")
    rows = {f"serving/{name}" for name in re.findall(r"^\| \d+ \| `([^`]+)/`", floors, flags=re.M)}
    parent = ""
    for line in folders.splitlines():
        if found := re.match(r"\*\*`([^`]+/)`\*\*", line):
            parent = found[1] if found[1].startswith("flavors") else f"serving/{found[1]}"
        elif found := re.match(r"\| `([^`]+)/` \|", line):
            rows.add(parent + found[1])
    rows = {
        row.removeprefix("serving/") if row.startswith(("serving/flavors", "serving/plugin")) else row for row in rows
    }
    known = {name for name, _ in packages()} - {"flavors", "serving"}
    assert rows == {name for name in known if not name.startswith(NATIVE)} - {"serving/metering/migrations/versions"}


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private attribute that is read, patched by its name, or imported."""
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            named = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PATCHES:
            constants = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            named = [value.rpartition(".")[2] for value in constants if isinstance(value, str)]
        for name in named:
            if re.match(r"_[a-z]", name):
                yield node.lineno, name


def test_no_test_looks_behind_the_doors() -> None:
    """Tests use the product as its callers do: private names are read only in the helpers named above, which say
    why."""
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        name = path.relative_to(ROOT / "tests").as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if name in INSIDERS:
            assert "private" in (ast.get_docstring(tree) or "").lower(), name  # which says why
            continue
        found += [f"{name}:{line}: {one}" for line, one in private_names(tree) if one not in LIBRARIES]
    assert not found, "\n".join(found)


class Function(NamedTuple):
    """A function of the tests: whether it asserts something itself, and the names of what it calls."""

    name: str
    asserts: bool
    calls: frozenset[str]


def functions_of(tree: ast.Module) -> list[Function]:
    """Return the functions and methods of a file, and the functions in them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = list(ast.walk(node))
            calls = [one.func for one in inner if isinstance(one, ast.Call)]
            names = [one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls]
            own = any(isinstance(one, ast.Assert) for one in inner) or any(EXPECTS.match(name) for name in names)
            found.append(Function(node.name, own, frozenset(names)))
    return found


def asserting(functions: list[Function]) -> set[str]:
    """Return the names of the functions that assert something, or call one that does."""
    found: set[str] = set()
    while more := {one.name for one in functions if one.asserts or one.calls & found} - found:
        found |= more
    return found


def test_each_test_asserts_something() -> None:
    """Each test asserts something, itself or by helpers of its file, of one that it imports, or of a conftest."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")}
    functions = {path: functions_of(tree) for path, tree in trees.items()}
    found = []
    for path, own in functions.items():
        tests = [one for one in own if one.name.startswith("test_") and not one.asserts]
        if not path.name.startswith("test_") or not tests:
            continue
        imported = {node.module for node in ast.walk(trees[path]) if isinstance(node, ast.ImportFrom)} | {"conftest"}
        near = [one for other, more in functions.items() if other.stem in imported for one in more]
        helpers = asserting([*own, *near])
        found += [f"{path.relative_to(ROOT)}: {one.name}" for one in tests if not one.calls & helpers]
    assert not found, "\n".join(found)


def test_each_test_runs_alone() -> None:
    """Test files import helpers from their own folder, or from one above that has a conftest: pytest puts no other on
    the path of a file that runs alone. None imports another test file."""
    tests = ROOT / "tests"
    helpers: dict[str, set[Path]] = {}
    for path in tests.rglob("*.py"):
        helpers.setdefault(path.stem, set()).add(path.parent)
    found = []
    for path in tests.rglob("test_*.py"):
        on_path = {path.parent, *(folder for folder in path.parents if (folder / "conftest.py").exists())}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in {name.partition(".")[0] for name in names}:
                elsewhere = name in helpers and name not in sys.stdlib_module_names and not helpers[name] & on_path
                if elsewhere or name.startswith("test_"):
                    found.append(f"{path.relative_to(tests)}: {name}")
    assert not found, "\n".join(found)


def test_the_names_of_headers_are_their_own() -> None:
    """No two headers of the kernels have the same name, so that a name says which one is meant."""
    names = [path.name for path in (PACKAGE / NATIVE).rglob("*.h")]
    assert len(names) == len(set(names)) > 30
