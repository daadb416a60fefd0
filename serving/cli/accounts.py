"""Keys, limits, prices and the audit log behind the commands: of a database, or of a server that is asked over HTTP."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

import click
from click.core import ParameterSource

from ..control.settings import DATABASE_VARIABLE
from ..http.paths import AUDIT, CURRENCY, KEYS, LIMITS, PRICES
from ..metering.accounts import Accounts
from ..metering.audit import here
from ..metering.store import Store
from .http import URL_VARIABLE, Client
from .http_connection import tls_options
from .key_options import key_options
from .store import DATABASE, opened

Told = dict[str, Any]
Body = Mapping[str, Any]
Query = Mapping[str, str]


class RemoteAccounts:
    """What ``metering.accounts.Accounts`` does, by a server. Every method raises ``ClickException``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create_key(self, body: Body) -> Told:
        return self._told(self._client.post(KEYS, body))

    def list_keys(self, query: Query) -> Told:
        return self._told(self._client.get(_with(KEYS, query)))

    def get_key(self, key: str) -> Told:
        return self._told(self._client.get(_key(key)))

    def update_key(self, key: str, body: Body) -> Told:
        return self._told(self._client.patch(_key(key), body))

    def rotate_key(self, key: str, body: Body) -> Told:
        return self._told(self._client.post(f"{_key(key)}/rotate", body))

    def revoke_key(self, key: str) -> Told:
        return self._told(self._client.delete(_key(key)))

    def list_limits(self, query: Query) -> Told:
        return self._told(self._client.get(_with(LIMITS, query)))

    def set_limits(self, body: Body) -> Told:
        return self._told(self._client.put(LIMITS, body))

    def delete_limit(self, query: Query) -> Told:
        return self._told(self._client.delete(_with(LIMITS, query)))

    def list_prices(self, query: Query) -> Told:
        return self._told(self._client.get(_with(PRICES, query)))

    def set_price(self, body: Body) -> Told:
        return self._told(self._client.put(PRICES, body))

    def delete_price(self, query: Query) -> Told:
        return self._told(self._client.delete(_with(PRICES, query)))

    def get_currency(self) -> Told:
        return self._told(self._client.get(CURRENCY))

    def set_currency(self, body: Body) -> Told:
        return self._told(self._client.put(CURRENCY, body))

    def list_audit(self, query: Query) -> Told:
        return self._told(self._client.get(_with(AUDIT, query)))

    def _told(self, answer: Any) -> Told:
        if not isinstance(answer, dict):
            raise click.ClickException("the server does not answer as our servers do: another server?")
        return answer


Books: TypeAlias = Accounts | RemoteAccounts


def _key(key: str) -> str:
    return f"{KEYS}/{quote(key, safe='')}"


def _with(path: str, query: Query) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def place_options(command: Any) -> Any:
    """``--database``, or ``--url`` with a key, ``--ca`` and ``--cert``; the command gets the first two and ``key``."""
    stored = click.option("--database", envvar=DATABASE_VARIABLE, help=f"{DATABASE}  [this or --url]")
    served = click.option("--url", envvar=URL_VARIABLE, help=f"A server, in place of its database ({URL_VARIABLE}).")
    return stored(served(key_options(tls_options(command))))


def books(*, make: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``place_options``: the command gets ``books``. ``make``: a database that is not there is made."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_books(*arguments: Any, database: str | None, url: str | None, key: str | None, **options: Any) -> Any:
            with books_of(database, url, key, make=make) as books:
                return command(*arguments, books=books, **options)

        return place_options(with_books)

    return decorate


@contextlib.contextmanager
def books_of(database: str | None, url: str | None, key: str | None, *, make: bool = False) -> Iterator[Books]:
    """See ``place``."""
    with place(database, url, key, make=make) as found:
        yield Accounts(found, by=here("command")) if isinstance(found, Store) else RemoteAccounts(found)


@contextlib.contextmanager
def place(database: str | None, url: str | None, key: str | None, *, make: bool = False) -> Iterator[Store | Client]:
    """The store, or the server. What the command line says wins over the environment, where a database wins over a
    server. Raises ``UsageError``."""
    context = click.get_current_context()
    said = {n for n in ("database", "url") if context.get_parameter_source(n) is ParameterSource.COMMANDLINE}
    if len(said) > 1:
        raise click.UsageError("--database and --url: give one of them")
    if url is not None and ("url" in said or database is None):
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
        raise click.UsageError("name a store with --database, or a server with --url")


def note(told: Told) -> None:
    """What people may have meant otherwise, on standard error."""
    for line in told.get("notes", ()):
        click.echo(f"note: {line}", err=True)
