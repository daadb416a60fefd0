"""``mlflow-llm replay`` and ``verify``: a past answer again, and whether a text is from it."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

import click

from ...interface.errors import Conflict, NotFound
from ...metering.proof.recorded import Recorded, logged_body, recorded
from ...system.escape import visible
from ..http import Client, url_options
from ..store import database, opened

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
OPENAI = ("chat/completions", "completions", "invocations")
"""Ends of the routes whose bodies have OpenAI's fields."""
OF_PROMPT = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
STREAMING = ("stream", "stream_options")
KNOWN = "docs/determinism.md says what changes bits"


@click.command()
@click.argument("request_id")
@database
@url_options
@click.option(
    "--prompt",
    type=click.File("rb"),
    help="File (-: standard input) with the request's JSON body as it was sent, or the text of a prompt or of a single "
    "user message. Without it, the body is taken from the payload log.",
)
def replay(request_id: str, database: str, url: str, key: str | None, prompt: BinaryIO | None) -> None:
    """Repeat the answer to a past request.

    REQUEST_ID is the `id` of the reply, not its X-Request-Id. The prompt is checked by the hash that the ledger keeps;
    then the server is asked with the seed and the settings of then. Prints the text, and on standard error whether it
    is the same, byte for byte. Exits with 1 if it is not. The repeated request is metered like any other.
    """
    with opened(database) as store:
        past = _past(store, request_id)
        _check_route(past)
        client = Client(url, key)
        _check_model(client, past)
        body = prompt.read() if prompt is not None else logged_body(store, request_id)
        if body is None:
            raise click.ClickException("the payload log does not have the request: give its body with --prompt")
        asked = _asked(client, past, body)
        status, reply, _ = client.ask(ROUTES[past.task], asked)
        if status >= 400:
            raise click.ClickException(f"{status}: {visible(_message(reply))}")
        choices = [_choice(one) for one in reply["choices"]]
        changes = past.changes(_past(store, reply["id"]))
    for one in choices:
        click.echo(one["text"] + one["calls"].replace("\0", "\n"))
    if past.says(choices):
        click.echo("same", err=True)
        return
    for change in changes:
        click.echo(change, err=True)
    reason = f"; {KNOWN}" if changes else "; nothing that is known to change bits has changed"
    raise click.ClickException(f"differs{reason}")


@click.command()
@click.argument("request_id")
@database
@click.option("--text", "file", type=click.File("rb"), required=True, help="File (-: standard input) with the text.")
def verify(request_id: str, database: str, file: BinaryIO) -> None:
    """Say whether a text is the answer to a past request.

    REQUEST_ID is the `id` of the reply, not its X-Request-Id. Compares the whole text with the hash that the ledger
    keeps; one line break at its end may have been added. Exits with 1 if it is another text.
    """
    with opened(database) as store:
        past = _past(store, request_id)
    try:
        text = file.read().decode()
    except UnicodeDecodeError:
        raise click.ClickException("the text is not UTF-8, which every answer is") from None
    found = past.choices_with(text) or past.choices_with(text.removesuffix("\n").removesuffix("\r"))
    if not found:
        raise click.ClickException(f"no: request {request_id} was answered with another text")
    click.echo(f"yes: choice {found[0]} of request {request_id}, by {past.model}")


def _past(store: Any, request_id: str) -> Recorded:
    try:
        return recorded(store, request_id)
    except (NotFound, Conflict) as error:
        raise click.ClickException(str(error)) from None


def _check_route(past: Recorded) -> None:
    route = past.proof.route
    if past.task not in ROUTES or not route.endswith(OPENAI):
        raise click.ClickException(
            f"request {past.request_id} came by {route}; only requests in OpenAI's form (…/chat/completions, "
            "…/completions, …/invocations) can be repeated. `mlflow-llm verify` works for all"
        )


def _check_model(client: Client, past: Recorded) -> None:
    """Refuse where the endpoint is gone or is answered by another model by now."""
    with client.understood():
        served = {model["id"]: model for model in client.get("/v1/models")["data"]}
    if past.endpoint not in served:
        raise click.ClickException(f"the server has no endpoint {past.endpoint} by now")
    now = [model.get("content_hash") for model in served[past.endpoint].get("served_models", ())]
    if past.content_hash is not None and now and None not in now and past.content_hash not in now:
        shown = ", ".join(str(one)[:12] for one in now)
        raise click.ClickException(
            f"the answer was by {past.model}; {past.endpoint} is answered by another version now ({shown}). "
            "Serve that version, and name its server with --url"
        )


def _asked(client: Client, past: Recorded, body: bytes) -> dict[str, Any]:
    """Return the body to send. Raises ``ClickException`` if the prompt is not that of the request."""
    sent, is_body = _read(past, body)
    settings = past.proof.settings
    if not is_body:
        if settings is None:
            raise click.ClickException(
                "the request had more than a prompt and plain settings (tools, images, a schema, log probabilities): "
                "it can only be repeated with its body, byte for byte"
            )
        if not past.has_prompts(_tokens(client, past, sent)):
            raise click.ClickException(f"the prompt is not that of request {past.request_id}: its hash is another")
    asked = {name: value for name, value in sent.items() if name not in STREAMING}
    if settings is not None:
        asked = {name: value for name, value in asked.items() if name != "max_completion_tokens"} | settings
    model = f"{past.endpoint}:{past.adapter}" if past.adapter else past.endpoint
    return {"model": model} | asked | {"seed": past.proof.seed}


def _read(past: Recorded, body: bytes) -> tuple[dict[str, Any], bool]:
    """Return the request's fields, and whether ``body`` is its body byte for byte."""
    for given in (body, body.removesuffix(b"\n")):
        if past.has_body(given):
            return json.loads(given), True
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise click.ClickException("the prompt is neither the request's body nor a text in UTF-8") from None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict) and ("messages" in found or "prompt" in found):
        return found, False
    text = text.removesuffix("\n")
    return ({"messages": [{"role": "user", "content": text}]} if past.task == "chat" else {"prompt": text}), False


def _tokens(client: Client, past: Recorded, sent: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of the prompts of a body, as the server makes them."""
    model = {"model": f"{past.endpoint}:{past.adapter}" if past.adapter else past.endpoint}
    if past.task == "chat":
        given = {name: sent[name] for name in OF_PROMPT if name in sent}
        return [_tokenized(client, model | given | {"messages": sent.get("messages")})]
    prompt = sent.get("prompt")
    prompts = prompt if isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt) else [prompt]
    return [one if isinstance(one, list) else _tokenized(client, model | {"prompt": one}) for one in prompts]


def _tokenized(client: Client, body: dict[str, Any]) -> list[int]:
    with client.understood():
        tokens: list[int] = client.post("/tokenize", body)["tokens"]
    return tokens


def _choice(choice: dict[str, Any]) -> dict[str, str]:
    """Return the parts of a choice, joined as their hashes are made."""
    message = choice.get("message")
    if message is None:
        return {"text": choice["text"], "reasoning": "", "calls": ""}
    calls = [call.get("function") or call.get("custom") for call in message.get("tool_calls") or ()]
    said = "".join(f"\0{call['name']}\0{call.get('arguments', call.get('input', ''))}" for call in calls)
    return {
        "text": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": said,
    }


def _message(reply: dict[str, Any]) -> str:
    error = reply.get("error", reply)
    return str(error.get("message", error) if isinstance(error, dict) else error)
