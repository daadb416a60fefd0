"""Rows of adapters that are loaded while their endpoint is served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import NotFound, RequestError
from mlflow_llm.serving.metering import Actor, Store

BY = Actor(name="ops", via="http")


@pytest.fixture
def endpoints(store_url: str) -> Iterator[EndpointStore]:
    store = Store(store_url)
    bundle = Bundle(content_hash="h", tasks=("chat",), model_dir="/m", tokenizer_dir="/t")
    endpoints = EndpointStore(store, locate=lambda found: tuple(ModelSource(uri=e.uri, bundle=bundle) for e in found))
    for name in ("chat", "other"):
        config = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}
        endpoints.create({"name": name, "config": config})
    yield endpoints
    store.close()


def test_an_adapter_is_loaded_replaced_and_removed(endpoints: EndpointStore) -> None:
    """Adapters are kept by endpoint and name; each load gets a new revision, and a second load must ask to replace."""
    adapters = endpoints.adapters
    first, none = adapters.put("chat", "legal", "/a", "/a", replace=False, by=BY)
    assert none is None
    adapters.put("other", "legal", "/b", "/b", replace=True)
    assert adapters.all()["chat"] == (first,)
    with pytest.raises(RequestError) as error:
        adapters.put("chat", "legal", "/c", "/c", replace=False)
    assert error.value.message == (
        "The lora adapter 'legal' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True."
    )
    second, old = adapters.put("chat", "legal", "/a", "/a", replace=True, pinned=True)
    assert old == first
    assert [one.pinned for one in (first, *adapters.all()["chat"])] == [False, True]
    assert second.revision != first.revision
    adapters.remove("chat", "legal", by=BY)
    with pytest.raises(NotFound, match=r"The lora adapter 'legal' cannot be found\."):
        adapters.remove("chat", "legal")
    assert list(adapters.all()) == ["other"]
    with pytest.raises(NotFound, match="nobody"):
        adapters.put("nobody", "legal", "/a", "/a", replace=False)


def test_taking_back_restores_the_replaced_adapter(endpoints: EndpointStore) -> None:
    """Taking back an adapter that no engine accepts restores the one it replaced and keeps a later load."""
    adapters = endpoints.adapters
    first, _ = adapters.put("chat", "legal", "/a", "/a", replace=False)
    second, old = adapters.put("chat", "legal", "/b", "/b", replace=True)
    adapters.take_back("chat", second, old)
    assert adapters.all() == {"chat": (first,)}
    adapters.take_back("chat", second, None)
    assert adapters.all() == {"chat": (first,)}
    adapters.take_back("chat", first, None)
    assert adapters.all() == {}


def test_adapters_are_deleted_with_their_endpoint(endpoints: EndpointStore) -> None:
    """Adapters are deleted with their endpoint: a new endpoint of the same name has none."""
    endpoints.adapters.put("chat", "legal", "/a", "/a", replace=False)
    endpoints.delete("chat")
    assert endpoints.adapters.all() == {}


def test_listeners_are_notified_of_changes(store_url: str) -> None:
    """A listener is notified of each change to the endpoints and adapters to be served, and of nothing else."""
    store, said = Store(store_url), []
    source = ModelSource(uri="m", bundle=Bundle(content_hash="h", tasks=("chat",), model_dir="/m", tokenizer_dir="/t"))
    endpoints = EndpointStore(store, locate=lambda found: (source,) * len(found), changed=lambda: said.append(1))
    config = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}
    endpoints.create({"name": "chat", "config": config})
    assert len(said) == 1
    endpoints.mark_ready("chat", 1)
    endpoints.update_config("chat", config)
    assert len(said) == 2
    new, old = endpoints.adapters.put("chat", "legal", "/a", "/a", replace=False)
    endpoints.adapters.take_back("chat", new, old)
    endpoints.adapters.put("chat", "legal", "/a", "/a", replace=False)
    endpoints.adapters.remove("chat", "legal")
    assert len(said) == 6
    endpoints.get("chat")
    endpoints.states()
    endpoints.set_ready("chat", False)
    assert len(said) == 6
    endpoints.delete("chat")
    assert len(said) == 7
    store.close()
