"""``/api/2.0/prompts``: prompts of MLflow's registry, for the page's playground (``control.mlflow_processes``).

Callers with the scope ``invoke`` read them; those with ``manage`` also save versions.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar

from ...control.mlflow_processes.prompt_registry import PromptDetails, PromptList, PromptRegistry
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import InvalidField, NotFound, Unavailable
from ...interface.readers import Entry, Reader, any_of, list_of, obj, one_of, reader, record, short_text, text
from ..query_parameters import limit_of, parameters
from ..route import Route
from .paths import PROMPTS

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CHARACTERS = 50_000  # of a template: MLflow keeps it in a tag, of which a store takes at least as much
MAX_ROWS = 200
DEFAULT_ROWS = 100
NAME = re.compile(r"[A-Za-z0-9_.-]{1,250}")
NAMED = "1 to 250 letters, digits, '_', '-' and '.'"
_PATTERN = f"^({NAME.pattern})$"
SEARCH_QUERY: dict[str, dict[str, Any]] = {
    "search": {"type": "string", "pattern": _PATTERN, "description": "Part of the names"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ROWS, "description": f"Prompts ({DEFAULT_ROWS})"},
}
LOAD_QUERY: dict[str, dict[str, Any]] = {
    "version": {"type": "string", "pattern": _PATTERN, "description": "A version's number or an alias (the newest)"}
}
_CONTENT = short_text(MAX_CHARACTERS)
_MESSAGE = record(
    role=Entry(one_of("system", "user", "assistant"), required="system, user or assistant"),
    content=Entry(_CONTENT, "May have variables: {{name}}", required="the message's text"),
)
_MESSAGES = list_of(_MESSAGE, "1 to 200 messages", minimum=1, maximum=200)


@reader(**any_of(_CONTENT.schema, _MESSAGES.schema))
def _template(value: Any, path: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return _CONTENT(value, path)
    if not isinstance(value, list):
        raise InvalidField(path, value, "a text, or a list of messages")
    messages = list(_MESSAGES(value, path))
    if len(json.dumps(messages)) > MAX_CHARACTERS:
        raise InvalidField(path, value, f"at most {MAX_CHARACTERS} characters as JSON")
    return messages


NEW_PROMPT: Reader[dict[str, Any]] = record(
    name=Entry(text(NAME, NAMED), required=NAMED),
    template=Entry(_template, "A text, or the messages of a chat", required="a text, or a list of messages"),
    commit_message=Entry(short_text(1000), "What is new in this version"),
    response_format=Entry(obj, "The JSON schema of replies"),
    model_config=Entry(obj, "The model and sampling values that the prompt is meant for"),
)


def _registry(server: WorkerState) -> PromptRegistry:
    if server.prompts is None:
        raise NotFound(
            "this server has no prompt registry: it is started without MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI"
        )
    return server.prompts


def _asked(request: Request, call: Callable[..., T], *arguments: Any) -> T:
    """Call the registry. Only callers who manage learn where it is and why it does not answer."""
    try:
        return call(*arguments)
    except Unavailable as error:
        logger.warning("prompts: %s", error.message)
        if request.caller.manages:
            raise
        words = "the prompt registry of this server does not answer; its log says why"
        raise Unavailable(words, retry_after=error.retry_after) from error


def search(server: WorkerState, request: Request) -> Answer:
    asked = _parameters(request, SEARCH_QUERY)
    registry = _registry(server)
    limit = limit_of(asked, MAX_ROWS, DEFAULT_ROWS)
    return json_answer(_asked(request, registry.search, asked.get("search", ""), limit))


def load(server: WorkerState, request: Request) -> Answer:
    asked = _parameters(request, LOAD_QUERY)
    registry = _registry(server)
    if not NAME.fullmatch(request.name):
        raise InvalidField("name", request.name, NAMED)
    return json_answer(_asked(request, registry.load, request.name, asked.get("version", "")))


def save(server: WorkerState, request: Request) -> Answer:
    given = NEW_PROMPT(request.json(), "")
    return json_answer(_asked(request, _registry(server).save, given))


def _parameters(request: Request, query: dict[str, dict[str, Any]]) -> dict[str, str]:
    asked = parameters(request, query)
    for name, value in asked.items():
        if "pattern" in query[name] and not NAME.fullmatch(value):
            raise InvalidField(name, value, NAMED)
    return asked


ROUTES = (
    Route(
        method="GET",
        path=PROMPTS,
        handler=with_body(search),
        reply=PromptList,
        summary="Prompts of MLflow's registry",
        auth=Auth.INVOKE,
        query=SEARCH_QUERY,
    ),
    Route(
        method="GET",
        path=f"{PROMPTS}/<name>",
        handler=with_body(load),
        reply=PromptDetails,
        summary="A version of a prompt",
        auth=Auth.INVOKE,
        query=LOAD_QUERY,
    ),
    Route(
        method="POST",
        path=PROMPTS,
        handler=with_body(save),
        reply=PromptDetails,
        summary="Save a version of a prompt in MLflow's registry",
        auth=Auth.MANAGE,
        body=NEW_PROMPT,
        example={"name": "greeting", "template": "Greet {{name}} in one sentence."},
    ),
)
