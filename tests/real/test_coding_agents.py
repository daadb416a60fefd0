"""Codex and Claude Code, unchanged and with the settings of ``docs/how-to/agents.md``, against a server of SmolLM2."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_server import served

from mlflow_llm.flavors import llm

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "agents.md"
DOCUMENTED = "http://localhost:8000"


def needs(program: str, package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program}: npm install -g {package}")


def recipe(language: str) -> str:
    """Return the page's only block in ``language``."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def greedy(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a server whose endpoint answers greedily: neither program sets a temperature."""
    root = tmp_path_factory.mktemp("agents")
    llm.save_model(root / "chat", smollm2_dir, link_files=True)
    with served(root, "-m", f"{root / 'chat'}=assistant", "-D", "temperature=0") as url:
        yield url


def lines(program: str, *arguments: str, home: Path, **environment: str) -> list[dict[str, Any]]:
    """Run a program in an empty directory, and return the JSON lines that it writes."""
    folder = home / "project"
    folder.mkdir(parents=True)
    given = {"PATH": os.environ["PATH"], "HOME": str(home)} | environment
    done = subprocess.run(
        (program, *arguments),
        cwd=folder,
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stdout + done.stderr
    return found


@needs("codex", "@openai/codex")
def test_codex(greedy: str, tmp_path: Path) -> None:
    """The configuration of the page, and short instructions for a small context: the model's text is shown."""
    home = tmp_path / "home"
    config = home / ".codex"
    config.mkdir(parents=True)
    (config / "short.md").write_text("Be brief.")
    short = f"model_instructions_file = {json.dumps(str(config / 'short.md'))}\n"
    (config / "config.toml").write_text(short + recipe("toml").replace(DOCUMENTED, greedy))
    asked = ("exec", "--json", "--skip-git-repo-check", "Say hi.")
    events = lines("codex", *asked, home=home, MLFLOW_LLM_KEY="x")
    said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    assert said, events
    assert said[0].strip()


@needs("claude", "@anthropic-ai/claude-code")
def test_claude_code(greedy: str, tmp_path: Path) -> None:
    """The variables of the page, with a short prompt and no tools for a small context: the model's text is shown."""
    exported = re.findall(r"^export (\w+)=(\S+)", recipe("bash"), re.MULTILINE)
    environment = {name: value.replace(DOCUMENTED, greedy) for name, value in exported}
    assert {"ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL"} <= set(environment)
    asked = ("-p", "Say hi.", "--tools", "", "--system-prompt", "Be brief.", "--output-format", "stream-json")
    events = lines(
        "claude", *asked, "--verbose", home=tmp_path / "home", **environment | {"ANTHROPIC_API_KEY": "sk-any"}
    )
    messages = [event["message"] for event in events if event["type"] == "assistant"]
    said = [block["text"] for message in messages for block in message["content"] if block["type"] == "text"]
    assert said, events
    assert {message["model"] for message in messages} == {"assistant"}
