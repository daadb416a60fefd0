"""The endpoints that tests of the controller share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.metering.store.store import Store


@pytest.fixture
def endpoints(store_url: str, instant_bundle: Bundle) -> Iterator[EndpointStore]:
    store = Store(store_url)
    yield EndpointStore(
        store, locate=lambda found: tuple(ModelSource(uri=entity.uri, bundle=instant_bundle) for entity in found)
    )
    store.close()
