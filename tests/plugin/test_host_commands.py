"""Two hosts join the database of a server, by the documented commands: state directories of their own on loopback."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from command_processes import await_line, llm_command

from mlflow_llm.plugin.processes import free_port

PAGE = Path(__file__).parents[2] / "docs" / "remote-engines.md"


def documented(replacements: dict[str, str]) -> list[list[str]]:
    """Return the words of the commands that the page shows for hosts that join, for this machine."""
    text = PAGE.read_text().partition("## Hosts that join")[2]
    found = re.search(r"```\n(.*?)```", text, re.S)
    assert found is not None
    block = found[1]
    for written, here in replacements.items():
        assert written in block
        block = block.replace(written, here)
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


def listed(words: list[str]) -> list[list[str]]:
    """Return the lines that ``mlflow-llm engines`` prints, as words."""
    command = [sys.executable, "-m", "mlflow_llm.serving.cli", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line.split() for line in done.stdout.splitlines()]


def hosts(url: str) -> list[dict[str, Any]]:
    """Return the hosts that the API lists."""
    with urllib.request.urlopen(f"{url}/api/2.0/engine-hosts") as answer:
        found: list[dict[str, Any]] = json.load(answer)["hosts"]
    return found


def states(hosts: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {one["name"]: [engine["state"] for engine in one["engines"]] for one in hosts}


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@contextlib.contextmanager
def host(place: Path, name: str, words: list[str]) -> Iterator[Path]:
    """Run a host's command with a state directory of its own, until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_LLM_STATE", str(place / name))
        command = llm_command(place, name, *words, "--name", name, "--runtime-dir", str(place / f"r{name}"))
        with command as log:
            await_line(log, "joined as")
            yield log


def test_hosts_run_what_is_served_by_the_documented_commands(
    place: Path, saved_model: Path, second_model: Path
) -> None:
    """A server without engines of its own answers from a host that joined; an update runs on both hosts; when one of
    them ends, the other answers.
    """
    port, ports = free_port(), {name: free_port() for name in "ab"}
    url = f"http://127.0.0.1:{port}"
    make_key, join, serve, engines, update = documented(
        {
            "engine.key": str(place / "key"),
            "postgresql://llm@db.internal/llm": f"sqlite:///{place}/serving.db",
            "tcp://10.0.0.7:5601": f"tcp://127.0.0.1:{ports['a']}",
            "models:/assistant/3": f"{saved_model}=assistant",
            "http://gateway-1:8000": url,
            "assistant/4": f"{second_model}",
        }
    )
    subprocess.run([sys.executable, "-m", "mlflow_llm.serving.cli", *make_key], check=True, capture_output=True)
    other = [f"tcp://127.0.0.1:{ports['b']}" if word.startswith("tcp://") else word for word in join]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def tokens() -> int:
        reply = client.completions.create(model="assistant", prompt="Once", max_tokens=5, temperature=0)
        assert reply.usage is not None
        return reply.usage.completion_tokens

    with client, contextlib.ExitStack() as first, host(place, "b", other):
        first.enter_context(host(place, "a", join))
        with llm_command(place, "serve", *serve, "--port", str(port), "--workers", "1") as log:
            await_line(log, "listening on")
            assert tokens() == 5
            assert sorted(states(hosts(url)).values()) == [[], ["READY"]]
            heads, *lines = listed(engines)
            assert heads[:2] == ["HOST", "STATE"]
            assert [line[:2] for line in lines] == [["a", "active"], ["b", "active"]]
            assert sum("ready" in line for line in lines) == 1
            command = [sys.executable, "-m", "mlflow_llm.serving.cli", *update, "--url", url]
            subprocess.run(command, check=True, capture_output=True)
            until(lambda: states(hosts(url)) == {"a": ["READY"], "b": ["READY"]})
            assert tokens() == 5
            first.close()
            assert states(hosts(url)) == {"b": ["READY"]}
            assert tokens() == 5
