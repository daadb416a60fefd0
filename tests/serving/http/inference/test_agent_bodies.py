"""Requests of coding agents, as the real programs sent them; their long texts are shortened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.dialects import DIALECTS, Head
from mlflow_llm.serving.interface.request import RawChat

RECORDED = Path(__file__).with_name("recorded")
DIALECT = {"codex": "responses", "claude_code": "anthropic"}


def recorded(program: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{program}.json").read_text())
    return found


def read(program: str, **fields: Any) -> RawChat:
    dialect = DIALECTS[DIALECT[program]]
    raw = dialect.decode(Head(dialect.routes[0], {}), json.dumps(recorded(program) | fields).encode())
    assert isinstance(raw, RawChat)
    return raw


@pytest.mark.parametrize("program", list(DIALECT))
def test_what_a_program_sends_is_read(program: str) -> None:
    """Every field by default is honoured, or accepted because it asks for nothing; all tools reach the model."""
    raw = read(program)
    assert raw.stream
    named = {tool.name for tool in raw.tools or ()}
    sent = recorded(program)["tools"]
    inner = [f"{one['name']}__{tool['name']}" for one in sent for tool in one.get("tools", ())]
    assert named == {one["name"] for one in sent if "tools" not in one} | set(inner)
    if program == "codex":
        assert inner


def test_the_prompt_of_claude_code_does_not_change_with_its_header() -> None:
    """Two requests that differ in the billing header alone are one to the model."""
    system = recorded("claude_code")["system"]
    header = system[0] | {"text": "x-anthropic-billing-header: cc_version=2.1.197.6f4; cc_entrypoint=cli; cch=b3a1f;"}
    assert (
        read("claude_code", system=[header, *system[1:]])
        == read("claude_code")
        == read("claude_code", system=system[1:])
    )


@pytest.mark.parametrize(
    ("program", "path", "last"),
    [("codex", "/v1/responses", "response.incomplete"), ("claude_code", "/v1/messages?beta=true", "message_stop")],
)
def test_a_program_is_answered(client: FlaskClient, program: str, path: str, last: str) -> None:
    """Streamed, up to the event with which the program ends its turn."""
    maximum = {"max_output_tokens": 8} if program == "codex" else {"max_tokens": 8}
    body = recorded(program) | maximum
    body.pop("thinking", None)  # as with MAX_THINKING_TOKENS=0: this model does not reason
    body["tools"] = body["tools"][:1]  # the model's context has no room for more
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.text.split("event: ")[-1].partition("\n")[0] == last
