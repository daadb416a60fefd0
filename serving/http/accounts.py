"""Answers of the routes of ``account_routes``: ``metering.accounts`` over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import NotFound
from ..metering.accounts import Accounts
from .account_routes import TABLE
from .answer import Answer, json_answer
from .invoke import Server
from .management import Asked

SECRET_HEADERS = {"Cache-Control": "no-store"}
WITH_SECRET = ("create_key", "rotate_key")


def _accounts(server: Server, asked: Asked) -> Accounts:
    if server.ledger is None:
        raise NotFound("this server has no keys, limits and prices of its own; start it with --database")
    return Accounts(server.ledger.store, by=asked.by, keys=server.keys)


def _answer(handler: str, path: str, *, reads_body: bool) -> Callable[[Server, Asked], Answer]:
    """What takes the name of the path, the body or the parameters, as the route has them."""

    def answer(server: Server, asked: Asked) -> Answer:
        arguments: list[Any] = [asked.name] if "<name>" in path else []
        if reads_body:
            arguments.append(asked.object())
        elif not arguments and handler != "get_currency":
            arguments.append(asked.single())
        found = getattr(_accounts(server, asked), handler)(*arguments)
        return json_answer(found, headers=SECRET_HEADERS if handler in WITH_SECRET else None)

    return answer


ANSWERS: Mapping[str, Callable[[Server, Asked], Answer]] = {
    handler: _answer(handler, path, reads_body=body is not None) for _, path, handler, _, body, _ in TABLE
}
