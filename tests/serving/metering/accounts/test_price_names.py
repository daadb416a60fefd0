"""One model has one name in prices, whichever way it is served."""

from __future__ import annotations

import msgspec
import pytest
import sqlalchemy as sa

from mlflow_llm.serving.metering.accounts.money import Price
from mlflow_llm.serving.metering.accounts.prices import Prices, price_names
from mlflow_llm.serving.metering.store.tables import ledger as ledger_rows
from mlflow_llm.serving.model_files.model_version import UNKNOWN, ModelVersion

ENTITY, ENDPOINT = "models:/assistant@champion", "chat"
MODEL = ModelVersion(name="assistant", version="3", content_hash="a" * 64)


def test_the_closest_name_counts(store) -> None:
    """The served entity's price comes first, then the version's, the model's, the endpoint's and that of all."""
    prices = Prices(store, clock=lambda: 1000.0)
    names = price_names(ENTITY, MODEL, ENDPOINT)
    assert names == (ENTITY, "assistant/3", "assistant", ENDPOINT)
    for amount, name in enumerate(["*", *reversed(names)], start=1):
        prices.set(name, Price(input=amount))
        assert Prices(store).at(names, 1001.0).input == amount  # another process, which has cached nothing


def test_what_a_command_line_asked_for_is_a_name(store) -> None:
    """The served entity has another name then, which comes first; its canary pays the same."""
    asked = msgspec.structs.replace(MODEL, asked=ENTITY)
    assert price_names("assistant-champion", asked, ENDPOINT)[:3] == ("assistant-champion", ENTITY, "assistant/3")
    prices = Prices(store, clock=lambda: 1000.0)
    prices.set(ENTITY, Price(input=5))
    prices.set("assistant", Price(input=3))
    for name in ("assistant-champion", "assistant-champion~2-3fa0"):
        assert prices.at(price_names(name, asked, ENDPOINT), 1001.0).input == 5
    assert prices.at(price_names("assistant-3", MODEL, ENDPOINT), 1001.0).input == 3


def test_an_unregistered_model_is_priced_by_its_endpoint(store) -> None:
    """A directory has no registered name: its endpoint's price holds, and never one of the empty name."""
    prices = Prices(store, clock=lambda: 1000.0)
    prices.set("chat", Price(input=7))
    assert prices.at(price_names("/some/where", UNKNOWN, "chat"), 1001.0).input == 7
    assert prices.at(price_names("/some/where", UNKNOWN, "other"), 1001.0).input == 0


@pytest.mark.parametrize("entity", ["models:/assistant@champion", "models:/assistant/3", "assistant-1"])
def test_the_ledger_books_the_price_of_the_model(store, ledger, reserve_of, entity: str) -> None:
    """A request is booked at the price of its registered model under whichever name that is served."""
    ledger.prices.set("assistant", Price(input=5_000_000, output=0, cached=5_000_000))
    reservation = msgspec.structs.replace(reserve_of("r-1"), entity=entity, model=MODEL)
    ledger.reserve(reservation).settle(completion=0)
    cost = store.read(lambda connection: connection.execute(sa.select(ledger_rows.c.cost)).scalar_one())
    assert cost == reservation.input_tokens * 5  # in millionths
