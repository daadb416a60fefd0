"""``mlflow-llm engine``, ``engine-key`` and ``serve --engine``: what is refused before anything is started."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.model_options import engine_addresses
from mlflow_llm.serving.control.model_sources import config_of
from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.interface.errors import PackagingError

ONE, TWO = "tcp://127.0.0.1:5601", "tcp://10.0.0.7:5601"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    assert invoke("engine-key", str(path)).exit_code == 0
    return str(path)


def test_a_new_key(key: str, tmp_path: Path) -> None:
    """A new key file is readable by its owner alone, different each time, and never replaced."""
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    first = Path(key).read_text()
    assert len(first.strip()) == 64
    again = invoke("engine-key", key)
    assert "File exists" in str(again.exception)
    assert Path(key).read_text() == first
    assert invoke("engine-key", str(tmp_path / "other")).exit_code == 0
    assert (tmp_path / "other").read_text() != first


@pytest.mark.parametrize(
    "command", [("engine", "-m", "x", "--key-file"), ("serve", "--port", "0", "-m", "x", "--engine", ONE)]
)
def test_bad_key_files_are_refused(key: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    """A key file that is missing, readable by others or too short is refused by name on both sides."""
    command = command if command[-1] == "--key-file" else (*command, "--engine-key-file")
    short = tmp_path / "short"
    short.touch(0o600)
    short.write_text("short")
    assert "No such file" in str(invoke(*command, str(tmp_path / "none")).exception)
    assert "at least 16 bytes" in str(invoke(*command, str(short)).exception)
    os.chmod(key, 0o640)
    assert "can be read by others; chmod 600 it" in str(invoke(*command, key).exception)


@pytest.mark.parametrize("address", ["127.0.0.1:5601", "tcp://*:5601", "tcp://host", "tcp://host:0", "ipc:///tmp/x"])
def test_an_address_is_tcp(key: str, address: str) -> None:
    """Both commands refuse an address that is not tcp://host:port."""
    if "*" not in address:
        assert "expected tcp://host:port" in str(
            invoke("engine", "-m", "x", "--listen", address, "--key-file", key).exception
        )
    if address != "tcp://*:5601":
        with pytest.raises(PackagingError, match="expected tcp://host:port"):
            engine_addresses((address,), ("a",), key)


def test_addresses_of_endpoints(key: str) -> None:
    """Engines are assigned by endpoint name, optional for a single endpoint; several engines are its replicas."""
    assert engine_addresses((ONE, f"a={TWO}"), ("a",), key) == {"a": (ONE, TWO)}
    assert engine_addresses((f"b={ONE}",), ("a", "b"), key) == {"b": (ONE,)}
    assert engine_addresses((), ("a",), None) == {}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-m", "x", "-m", "y", "--engine", ONE), "name an endpoint"),
        (("-m", "x", "--engine", f"z={ONE}"), "name an endpoint"),
        (("-m", "x", "--engine", ONE, "--engine", ONE), "given twice"),
        (("-m", "x", "--engine", ONE, "-C", "dtype=bfloat16"), "the engines run on other hosts"),
    ],
)
def test_what_serve_refuses(key: str, arguments: tuple[str, ...], reason: str) -> None:
    """serve refuses an engine without an endpoint, one given twice, and settings that remote engines would not have."""
    done = invoke("serve", "--port", "0", *arguments, "--engine-key-file", key)
    assert done.exit_code == 2
    assert reason in done.output


def test_a_key_and_engines_go_together(key: str) -> None:
    """--engine without its key, and a key without --engine, are refused."""
    assert "--engine-key-file" in str(invoke("serve", "--port", "0", "-m", "x", "--engine", ONE).exception)
    assert "goes with --engine" in invoke("serve", "--port", "0", "-m", "x", "--engine-key-file", key).output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-m", "x"), "do not go with --join"),
        (("-C", "dtype=bfloat16"), "the servers send the other settings"),
        (("--listen", "tcp://0.0.0.0:5601"), "name this host's address"),
    ],
)
def test_what_a_host_that_joins_refuses(key: str, tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    """A host that joins names no model, no settings and no address that others cannot connect to."""
    done = invoke("engine", "--join", f"sqlite:///{tmp_path}/x.db", "--key-file", key, *arguments)
    assert reason in done.output + str(done.exception)


def test_options_of_joined_hosts_go_with_join(key: str) -> None:
    """--memory and --name without --join are refused, and so is --placement hosts without a database."""
    assert "go with --join" in invoke("engine", "-m", "x", "--key-file", key, "--name", "a").output
    found = invoke("serve", "--port", "0", "-m", "x", "--placement", "hosts", "--engine-key-file", key)
    assert "placement" in str(found.exception)
    assert "--database" in str(found.exception)


def test_engines_elsewhere_are_not_scaled(instant_bundle) -> None:
    """An endpoint on remote engines can be neither provisioned nor scaled to zero."""
    for more in ({"scale_to_zero_enabled": True}, {"max_provisioned_throughput": 10}):
        spec = EndpointSpec(name="a", entity="m", bundle=instant_bundle, addresses=(ONE,), key_file="k", **more)
        with pytest.raises(PackagingError, match="neither provisioned nor scaled"):
            config_of(spec)
