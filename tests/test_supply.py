"""The project's supply chain: lockfiles with hashes, and the wheel's bill of materials."""

import configparser
import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = {"tests/requirements.lock": "tests/requirements.txt", "examples/quickstart/requirements.lock": None}


def asked(extra):
    """Return requirements of setup.cfg with the extra gguf, and those of the file ``extra``, with the extra docs."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"] + config["options.extras_require"]["gguf"]
    lines += config["options.extras_require"]["docs"] + "\n" + (ROOT / extra).read_text() if extra else ""
    plain = (line.partition("#")[0].strip() for line in lines.splitlines())
    return [Requirement(line) for line in plain if line]


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_fit_the_requirements(lock):
    """Every requirement but torch has a locked version within its bounds, so that an outdated lockfile is found (bash
    tests/lock.sh)."""
    locked = {}
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^ ;\\]+)", (ROOT / lock).read_text(), re.M):
        locked.setdefault(canonicalize_name(name), []).append(version)
    for requirement in asked(LOCKS[lock]):
        if requirement.name != "torch":
            versions = locked.get(canonicalize_name(requirement.name), [])
            assert versions, requirement
            assert all(requirement.specifier.contains(version) for version in versions), requirement
    assert "torch" not in locked
    assert "setuptools" in locked


@pytest.mark.parametrize("lock", LOCKS)
def test_every_file_has_its_hash(lock):
    """A lockfile holds only names, versions, markers and SHA-256: no index, no URL, no local file."""
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 100
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9_.\[\],-]+==[^ ]+( ; .*?)?( +--hash=sha256:[0-9a-f]{64})+", line.strip()), line
        assert "://" not in line


def bill(folder):
    """Return the bill in the installed wheel, or in a source tree the one that a build makes."""
    if (ROOT / "setup.py").is_file():
        command = [sys.executable, "-W", "ignore", "setup.py", "-q", "dist_info", "--output-dir", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (found,) = folder.glob("*.dist-info/sboms/*.json")
        return found.read_text()
    (path,) = (p for p in importlib.metadata.files("mlflow-llm") if ".dist-info/sboms/" in p.as_posix())
    return path.read_text()


def test_the_bill_of_materials(tmp_path):
    """The CycloneDX bill names the project and its version, each requirement with its bounds, and the kernels' sources
    with their hashes."""
    found = json.loads(bill(tmp_path))
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    project = found["metadata"]["component"]
    assert project["name"] == "mlflow-llm"
    assert project["purl"] == f"pkg:pypi/mlflow-llm@{project['version']}"
    by_name = {component["name"]: component for component in found["components"]}
    for requirement in asked(None):
        component = by_name[requirement.name]
        assert component["purl"] == f"pkg:pypi/{canonicalize_name(requirement.name)}"
        bounds = Requirement(f"x{component['properties'][0]['value']}").specifier
        assert bounds == requirement.specifier
    assert by_name["gguf"]["scope"] == "optional"
    sources = [component for component in found["components"] if component["type"] == "file"]
    assert {"native.cpp"} < {Path(source["name"]).name for source in sources}
    (depends,) = found["dependencies"]
    assert set(depends["dependsOn"]) == {component["bom-ref"] for component in found["components"]}


def test_a_build_leaves_nothing_in_the_checkout(tmp_path):
    """Modules are built in a folder outside the checkout, which is gone afterwards."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("run from a copy without the sources")
    checkout, outside = tmp_path / "checkout", tmp_path / "outside"
    (checkout / "mlflow_llm").mkdir(parents=True)
    outside.mkdir()
    (checkout / "mlflow_llm/__init__.py").touch()
    for name in ("setup.py", "setup.cfg", "README.md", "LICENSE"):
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_py"]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, env={**os.environ, "TMPDIR": str(outside)})
    assert not (checkout / "build").exists()
    assert list(outside.iterdir()) == []


def test_the_quickstart_installs_its_whole_lock() -> None:
    """The quickstart's pips get every requirement of the lock once, each with its hashes, and count what they fetch."""
    quickstart = runpy.run_path(str(ROOT / "examples/quickstart/install.py"))
    text = (ROOT / "examples/quickstart/requirements.lock").read_text()
    found = quickstart["requirements"](text)
    names = [quickstart["name_of"](one) for one in found]
    assert names == re.findall(r"^([a-z0-9][a-z0-9-]*)", text, re.MULTILINE)
    assert set(quickstart["FIRST"]) <= set(names)
    assert sum(one.count("--hash=sha256:") for one in found) == text.count("--hash=sha256:")
    output = "Ignoring a: markers do not match\nCollecting b==1\n  Downloading b-1.whl (190.2 MB)\nCollecting c\n"
    assert (quickstart["fetched"](output), quickstart["left_out"](output)) == (2, 1)
    assert quickstart["sizes"](output) == "190.2 MB"
