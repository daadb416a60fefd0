"""The contents of adapters in the store: put once, whole, within a limit, and removed when no adapter has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from mlflow_llm.serving.endpoints.adapter_contents import ABANDONED_MS, KEEP_MS, AdapterContents
from mlflow_llm.serving.endpoints.adapters import ContentGone
from mlflow_llm.serving.endpoints.config import ModelSource
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import LimitExceeded, PackagingError, RequestError
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.metering.store.tables import file_chunks, files
from mlflow_llm.serving.model_files.adapter_contents import (
    CHUNK_BYTES,
    CONFIG,
    WEIGHTS,
    AdapterContent,
    content_of,
    pieces,
    read_piece,
)

GIB = 2**30


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


class Place:
    """Two gateways' views of one store, with a clock that tests move."""

    def __init__(self, url: str, folder: Path) -> None:
        bundle = Bundle(content_hash="h", tasks=("chat",), model_dir="/m", tokenizer_dir="/t")
        self.clock, self.store, self._folder = Clock(), Store(url), folder
        self.endpoints = EndpointStore(
            self.store,
            locate=lambda found: tuple(ModelSource(uri=e.uri, bundle=bundle) for e in found),
            clock=self.clock,
        )
        self.contents: AdapterContents = self.endpoints.adapters.contents
        config = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}
        self.endpoints.create({"name": "chat", "config": config})

    def adapter(self, name: str, weights: bytes) -> tuple[AdapterContent, Path]:
        place = self._folder / name
        place.mkdir()
        (place / CONFIG).write_text("{}")
        (place / WEIGHTS).write_bytes(weights)
        return content_of(place), place

    def put(self, content: AdapterContent, place: Path, maximum: int = GIB) -> None:
        self.contents.put(content, (read_piece(*piece) for piece in pieces(content, place)), maximum=maximum)

    def load(self, name: str, content: AdapterContent, *, replace: bool = False) -> None:
        self.endpoints.adapters.put("chat", name, "/a", "/a", replace=replace, content_hash=content.content_hash)

    def rows(self) -> tuple[int, int]:
        """Return how many contents and how many parts there are."""
        counts = (sa.select(sa.func.count()).select_from(table) for table in (files, file_chunks))
        return self.store.read(lambda connection: tuple(connection.execute(one).scalar_one() for one in counts))  # type: ignore[return-value]

    def prune(self) -> int:
        return sum(iter(self.contents.prune, 0))


@pytest.fixture
def place(store_url: str, tmp_path: Path) -> Iterator[Place]:
    place = Place(store_url, tmp_path)
    yield place
    place.store.close()


def test_a_content_is_read_as_it_was_put_and_put_once(place: Place) -> None:
    """Its parts are those of the files; a second put of the same, from anywhere, reads no file and adds nothing."""
    content, folder = place.adapter("a", b"x" * (CHUNK_BYTES + 5))
    place.put(content, folder)
    read = [place.contents.part(content.content_hash, number) for number in range(5)]
    assert read == [content.described, b"{}", b"x" * CHUNK_BYTES, b"xxxxx", None]
    assert place.contents.part("0" * 64, 0) is None
    before = place.rows()
    place.contents.put(content, iter(()), maximum=1)
    assert place.rows() == before == (1, 4)


def test_an_upload_that_ends_early_is_no_content(place: Place) -> None:
    """Files that changed since they were hashed are refused; a killed upload is not read, and goes after an hour."""
    content, folder = place.adapter("a", b"weights")
    (folder / WEIGHTS).write_bytes(b"changed")
    with pytest.raises(PackagingError, match="changed while they were read"):
        place.put(content, folder)
    with pytest.raises(RuntimeError, match="killed"):
        place.contents.put(content, _killed(), maximum=GIB)
    assert place.contents.part(content.content_hash, 0) is None
    with pytest.raises(ContentGone):
        place.load("legal", content)
    place.clock.now += ABANDONED_MS / 1000 - 1
    assert place.prune() == 0
    place.clock.now += 1
    assert (place.prune(), place.rows()) == (2, (0, 0))


def _killed() -> Iterator[bytes]:
    yield b"{}"
    raise RuntimeError("killed")


def test_all_contents_together_are_limited(place: Place) -> None:
    """A content that does not fit beside the others is refused with the sizes, and fits when another one has gone."""
    first, one = place.adapter("a", b"1" * 98)
    second, two = place.adapter("b", b"2" * 98)
    place.put(first, one, maximum=150)
    with pytest.raises(LimitExceeded, match="have 100 bytes and this one 100; max_adapter_storage allows 150"):
        place.put(second, two, maximum=150)
    assert place.rows() == (1, 3)
    place.clock.now += KEEP_MS / 1000
    assert place.prune() == 1
    place.put(second, two, maximum=150)
    assert place.contents.part(second.content_hash, 0) == second.described


def test_a_content_stays_as_long_as_an_adapter_has_it(place: Place) -> None:
    """A content goes some minutes after its last adapter was replaced or unloaded, and not while another has it."""
    first, one = place.adapter("a", b"1")
    second, two = place.adapter("b", b"2")
    for content, folder in ((first, one), (second, two)):
        place.put(content, folder)
    place.load("legal", first)
    place.load("poet", first)
    place.load("legal", second, replace=True)
    place.clock.now += KEEP_MS / 500
    assert place.prune() == 0
    assert place.contents.used() == {first.content_hash, second.content_hash}
    place.endpoints.adapters.remove("chat", "poet")
    assert place.prune() == 0
    place.clock.now += KEEP_MS / 1000
    assert place.prune() == 1
    assert place.contents.part(first.content_hash, 0) is None
    assert place.contents.part(second.content_hash, 0) == second.described
    place.endpoints.delete("chat")
    assert place.prune() == 1


def test_a_refused_load_finds_the_content_of_before(place: Place) -> None:
    """Taking back a load restores the adapter that it replaced, whose content is still there however old it is."""
    first, one = place.adapter("a", b"1")
    second, two = place.adapter("b", b"2")
    place.put(first, one)
    place.load("legal", first)
    place.clock.now += KEEP_MS / 500
    place.put(second, two)
    adapters = place.endpoints.adapters
    new, old = adapters.put("chat", "legal", "/b", "/b", replace=True, content_hash=second.content_hash)
    assert place.prune() == 0
    adapters.take_back("chat", new, old)
    (now,) = adapters.all()["chat"]
    assert (now, now.content_hash) == (old, first.content_hash)
    assert place.contents.part(first.content_hash, 0) == first.described


def test_concurrent_adds_leave_one_content_and_one_adapter(place: Place, store_url: str) -> None:
    """When several gateways add the same adapter at once, one adds it and the others are refused; the content is there
    once, whole."""
    content, folder = place.adapter("a", b"x" * (2 * CHUNK_BYTES))
    outcomes: list[str] = []
    gate = threading.Barrier(4)

    def add() -> None:
        store = Store(store_url)
        endpoints = EndpointStore(store, locate=lambda found: (), clock=place.clock)
        gate.wait(60)
        parts = (read_piece(*piece) for piece in pieces(content, folder))
        endpoints.adapters.contents.put(content, parts, maximum=GIB)
        try:
            endpoints.adapters.put("chat", "legal", "/a", "/a", replace=False, content_hash=content.content_hash)
            outcomes.append("added")
        except RequestError:
            outcomes.append("refused")
        store.close()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert sorted(outcomes) == ["added", "refused", "refused", "refused"]
    assert place.rows() == (1, 4)
    assert len(place.endpoints.adapters.all()["chat"]) == 1
