"""Engines on other hosts whose network fails: hosts of our own, in network namespaces.

A cable that is pulled breaks no connection: what is sent is lost, and neither side learns of it. The neighbours'
hardware addresses are made wrong for that, on both sides.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from engine_process import EngineProcess, engine_process
from instant_model import write_instant_model
from remote_calls import LASTING, replicas, samples, streams
from server_calls import BODY, ask, asking, text_and_usage, until, well
from serving_process import Running, running

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.transport.auth import write_key

NOBODY = "02:00:00:00:00:01"


class Host:
    """A host in a network namespace. ``prefix`` runs a command on it; ``cut`` drops all its packets until ``mend``."""

    def __init__(self, number: int) -> None:
        self.name = f"mll{os.getpid()}-{number}"
        self._ours, self._theirs = f"m{os.getpid() % 10**7}o{number}", f"m{os.getpid() % 10**7}t{number}"
        subnet = f"10.{213 + number}.{os.getpid() // 250 % 250}"
        self._gateway, self.ip = f"{subnet}.1", f"{subnet}.2"
        self.prefix = ("ip", "netns", "exec", self.name)

    def create(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self._ours, "type", "veth", "peer", "name", self._theirs, "netns", self.name)
        ip("addr", "add", f"{self._gateway}/24", "dev", self._ours)
        ip("link", "set", self._ours, "up")
        for words in (f"addr add {self.ip}/24 dev {self._theirs}", f"link set {self._theirs} up", "link set lo up"):
            ip("-n", self.name, *words.split())

    def remove(self) -> None:
        subprocess.run(["ip", "link", "del", self._ours], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)

    def cut(self) -> None:
        self._neighbours("replace", "lladdr", NOBODY, "nud", "permanent")

    def mend(self) -> None:
        self._neighbours("del")

    def _neighbours(self, verb: str, *words: str) -> None:
        ip("neigh", verb, self.ip, "dev", self._ours, *words)
        ip("-n", self.name, "neigh", verb, self._gateway, "dev", self._theirs, *words)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    one, other = Host(1), Host(2)
    try:
        one.create()
        other.create()
    except OSError as error:  # no such command, or not allowed
        one.remove()
        other.remove()
        pytest.skip(f"needs network namespaces: {error}")
    yield one, other
    one.remove()
    other.remove()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a model whose engine takes 10 ms a step."""
    return write_instant_model(tmp_path_factory.mktemp("model"), step_delay=0.01)


@pytest.fixture(scope="module")
def apart(hosts: tuple[Host, Host], bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server over an engine on each host."""
    key = str(tmp_path_factory.mktemp("keys") / "key")
    write_key(key)
    with contextlib.ExitStack() as stack:
        engines: list[EngineProcess] = []
        for host in hosts:
            address = f"tcp://{host.ip}:5601"
            engines.append(stack.enter_context(engine_process(bundle, key, address=address, prefix=host.prefix)))
        for engine in engines:
            engine.await_ready()
        addresses = tuple(engine.address for engine in engines)
        server = stack.enter_context(running(bundle, addresses=addresses, key_file=key))
        until(lambda: replicas(server) == 2)
        yield server


@pytest.fixture(scope="module")
def expected(apart: Running) -> tuple[str, dict]:
    """Return text and usage of an undisturbed ``LASTING``."""
    with asking(apart, LASTING) as answer:
        return text_and_usage(answer.read())


def test_a_short_loss_is_a_pause(apart: Running, hosts: tuple[Host, Host], expected: tuple[str, dict]) -> None:
    """After three seconds without a network every stream is complete, and no engine was given up."""

    def lose() -> None:
        hosts[0].cut()
        time.sleep(3)
        hosts[0].mend()

    before = apart.log()
    assert streams(apart, 6, lose) == [expected] * 6
    assert "no engine" not in apart.log().removeprefix(before)
    assert replicas(apart) == 2


def test_a_host_that_vanishes_moves_its_streams(
    apart: Running, hosts: tuple[Host, Host], expected: tuple[str, dict]
) -> None:
    """The streams of a vanished host continue on the other one; when it returns it is used again, and runs nothing of
    them.
    """
    assert streams(apart, 6, hosts[0].cut) == [expected] * 6
    until(lambda: replicas(apart) == 1)
    assert well(apart)
    assert ask(apart, BODY)[0] == 200
    hosts[0].mend()
    until(lambda: replicas(apart) == 2 and well(apart))
    until(lambda: samples(apart)["mlflow_llm_running_sequences"] == 0)
    assert streams(apart, 4, lambda: None) == [expected] * 4
