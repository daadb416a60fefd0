"""Keys, limits, prices and the audit log for the commands: of a database, or of a server by its management API."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

import click
from click.core import ParameterSource

from ...control.settings import DATABASE_VARIABLE
from ...http.management.paths import AUDIT, CURRENCY, KEYS, LIMITS, PRICES
from ...metering.accounts.accounts import Accounts
from ...metering.accounts.audit import here
from ...metering.store.store import Store
from ..http import URL_VARIABLE, Client
from ..http_connection import tls_options
from ..key_options import key_options
from ..shared_options import SharedOption
from ..store import DATABASE, opened

Answer = dict[str, Any]
Body = Mapping[str, Any]
Query = Mapping[str, str]


class RemoteAccounts:
    """``metering.accounts.Accounts`` by a server's management API. Every method raises ``ClickException``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create_key(self, body: Body) -> Answer:
        return self._told(self._client.post(KEYS, body))

    def list_keys(self, query: Query) -> Answer:
        return self._told(self._client.get(_with(KEYS, query)))

    def get_key(self, key: str) -> Answer:
        return self._told(self._client.get(_key(key)))

    def update_key(self, key: str, body: Body) -> Answer:
        return self._told(self._client.patch(_key(key), body))

    def rotate_key(self, key: str, body: Body) -> Answer:
        return self._told(self._client.post(f"{_key(key)}/rotate", body))

    def revoke_key(self, key: str) -> Answer:
        return self._told(self._client.delete(_key(key)))

    def list_limits(self, query: Query) -> Answer:
        return self._told(self._client.get(_with(LIMITS, query)))

    def set_limits(self, body: Body) -> Answer:
        return self._told(self._client.put(LIMITS, body))

    def delete_limit(self, query: Query) -> Answer:
        return self._told(self._client.delete(_with(LIMITS, query)))

    def list_prices(self, query: Query) -> Answer:
        return self._told(self._client.get(_with(PRICES, query)))

    def set_price(self, body: Body) -> Answer:
        return self._told(self._client.put(PRICES, body))

    def delete_price(self, query: Query) -> Answer:
        return self._told(self._client.delete(_with(PRICES, query)))

    def get_currency(self) -> Answer:
        return self._told(self._client.get(CURRENCY))

    def set_currency(self, body: Body) -> Answer:
        return self._told(self._client.put(CURRENCY, body))

    def list_audit(self, query: Query) -> Answer:
        return self._told(self._client.get(_with(AUDIT, query)))

    def _told(self, answer: Any) -> Answer:
        if not isinstance(answer, dict):
            raise click.ClickException("the server does not answer like an mlflow-llm server")
        return answer


AccountsApi: TypeAlias = Accounts | RemoteAccounts


def _key(key: str) -> str:
    return f"{KEYS}/{quote(key, safe='')}"


def _with(path: str, query: Query) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def store_options(command: Any) -> Any:
    """Add ``--database``, and ``--url`` with its key, ``--ca`` and ``--cert``, to a command.

    It gets the arguments ``database``, ``url`` and ``key``.
    """
    stored = click.option("--database", cls=SharedOption, envvar=DATABASE_VARIABLE, help=f"{DATABASE} Or give --url.")
    served = click.option(
        "--url",
        cls=SharedOption,
        envvar=URL_VARIABLE,
        help=f"URL of a server, instead of its database ({URL_VARIABLE}).",
    )
    return stored(served(key_options(tls_options(command))))


def with_accounts(*, make: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``store_options`` to a command, which gets ``accounts``. ``make``: a missing database is created."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def opened_for(*arguments: Any, database: str | None, url: str | None, key: str | None, **options: Any) -> Any:
            with open_accounts(database, url, key, make=make) as accounts:
                return command(*arguments, accounts=accounts, **options)

        return store_options(opened_for)

    return decorate


@contextlib.contextmanager
def open_accounts(
    database: str | None, url: str | None, key: str | None, *, make: bool = False
) -> Iterator[AccountsApi]:
    """Yield the accounts of a store or a server, as ``open_store_or_server`` chooses. Raises ``UsageError``."""
    with open_store_or_server(database, url, key, make=make) as found:
        yield Accounts(found, by=here("command")) if isinstance(found, Store) else RemoteAccounts(found)


@contextlib.contextmanager
def open_store_or_server(
    database: str | None, url: str | None, key: str | None, *, make: bool = False
) -> Iterator[Store | Client]:
    """Yield the store, or a client of the server, that the options name.

    The command line overrides the environment, in which a database comes before a server. Raises ``UsageError``.
    """
    context = click.get_current_context()
    given = {n for n in ("database", "url") if context.get_parameter_source(n) is ParameterSource.COMMANDLINE}
    if len(given) > 1:
        raise click.UsageError("--database and --url: give one of them")
    if url is not None and ("url" in given or database is None):
        client = Client(url, key, timeout=30)
        try:
            with client.understood():
                yield client
        finally:
            client.close()
    elif database is not None:
        with opened(database, make=make) as store:
            yield store
    else:
        raise click.UsageError("name a database with --database, or a server with --url")


def print_notes(answer: Answer) -> None:
    """Print the notes of an answer, which name likely mistakes, on standard error."""
    for line in answer.get("notes", ()):
        click.echo(f"note: {line}", err=True)
