"""Embeddings through the whole engine on tiny random encoders and decoders."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import request_of
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.cores.embedding_core import EmbeddingCore
from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
from mlflow_llm.serving.interface.bundle import Bundle, EmbeddingSpec
from mlflow_llm.serving.interface.errors import (
    Aborted,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    NotFound,
    ShuttingDown,
)
from mlflow_llm.serving.interface.events import Embedded, Failed
from mlflow_llm.serving.interface.request import Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
MODELS: dict[str, Any] = {
    "encoder": (lambda: BertModel(BertConfig(**SIZES)), "mean"),
    "decoder": (lambda: LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2)), "lasttoken"),
}
TEXTS = ((5, 6, 7), (9,), (8, 7, 6, 5, 4, 3, 2, 9, 10), tuple(range(3, 33)), (4, 4, 5))


class Served:
    def __init__(self, kind: str, folder: Path) -> None:
        make, self.pooling = MODELS[kind]
        torch.manual_seed(0)
        self.model = make().eval()
        self.model.save_pretrained(folder)
        self.bundle = Bundle(
            content_hash="tiny",
            tasks=("embeddings",),
            model_dir=str(folder),
            tokenizer_dir="",
            embedding=EmbeddingSpec(pooling=self.pooling),
        )

    @torch.inference_mode()
    def expected(self, ids: tuple[int, ...]) -> Any:
        """Return the model's own forward of one text, pooled by hand."""
        hidden = self.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        vector = hidden[-1] if self.pooling == "lasttoken" else hidden.mean(0)
        return (vector / vector.norm()).numpy()


@pytest.fixture(scope="module", params=sorted(MODELS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def core(served: Served) -> Iterator[EngineCore]:
    core = EngineCore(served.bundle, EngineSettings(max_num_batched_tokens=16))
    yield core
    core.check_integrity()
    assert not core.has_work()
    core.close()


def ask(request_id: str, *texts: tuple[int, ...], **more: Any) -> ValidRequest:
    sequences = tuple(Sequence(prompt_token_ids=text) for text in texts)
    return ValidRequest(request_id=request_id, task="embeddings", model="m", sequences=sequences, **more)


def take(core: EngineCore) -> dict[str, dict[int, Any]]:
    """Return vectors by request and index, with a ``Failed`` under index -1; fail on duplicates or events after an
    end."""
    reported: dict[str, dict[int, Any]] = {}
    while core.has_work():
        for _, request_id, event in core.step():
            found = reported.setdefault(request_id, {})
            assert -1 not in found
            if isinstance(event, Failed):
                found[-1] = event
                continue
            assert isinstance(event, Embedded)
            assert event.index not in found
            found[event.index] = np.frombuffer(event.vector, dtype="<f4")
    return reported


def test_requests_batched_together_equal_each_text_alone(core: EngineCore, served: Served) -> None:
    """Texts of several requests, over several batches and beyond a batch's size, are those of the model's forward."""
    core.add(ask("a", *TEXTS))
    core.add(ask("b", *reversed(TEXTS)))
    core.add(ask("c", TEXTS[3]))
    reported = take(core)
    for name, texts in (("a", TEXTS), ("b", TEXTS[::-1]), ("c", (TEXTS[3],))):
        assert sorted(reported[name]) == list(range(len(texts)))
        for index, text in enumerate(texts):
            assert np.allclose(reported[name][index], served.expected(text), atol=1e-5)


def test_batch_invariant(served: Served) -> None:
    """With batch_invariant a text has the same bits alone and among others, because it is computed by itself."""
    core = EngineCore(served.bundle, EngineSettings(batch_invariant=True))
    alone = []
    for i, text in enumerate(TEXTS):
        core.add(ask(str(i), text))
        alone.append(take(core)[str(i)][0])
    core.add(ask("all", *TEXTS))
    core.add(ask("more", *TEXTS[::-1]))
    together = take(core)
    for i in range(len(TEXTS)):
        assert together["all"][i].tobytes() == alone[i].tobytes() == together["more"][len(TEXTS) - 1 - i].tobytes()
    core.close()


def test_a_short_request_does_not_wait_behind_a_bulk(core: EngineCore) -> None:
    """Requests take turns: one text that comes after a bulk of many batches is in the next batch."""
    core.add(ask("bulk", *[(3, 4, 5, 6, 7, 8)] * 20))
    core.step()
    core.add(ask("short", (9,)))
    reported = core.step()
    assert "short" in {request_id for _, request_id, _ in reported}
    assert len(take(core)["bulk"]) == 20 - 2 - sum(request_id == "bulk" for _, request_id, _ in reported)


def test_vectors_are_whole_whatever_dimensions(core: EngineCore, served: Served) -> None:
    """The engine returns whole vectors: ``dimensions`` are cut above it, in one place for every engine."""
    core.add(ask("a", TEXTS[0], dimensions=8))
    assert np.allclose(take(core)["a"][0], served.expected(TEXTS[0]), atol=1e-5)


def test_abort_ends_what_waits_and_nothing_else(core: EngineCore, served: Served) -> None:
    """An aborted request gets one terminal event, before its first batch or between two; the others are answered."""
    core.add(ask("gone", *TEXTS))
    core.add(ask("half", *TEXTS * 4))
    core.add(ask("kept", *TEXTS))
    core.abort("gone")
    first = core.step()
    core.abort("half")
    reported = take(core)
    early = {event.index: np.frombuffer(event.vector, dtype="<f4") for _, name, event in first if name == "kept"}
    kept = early | reported["kept"]
    assert [event.kind for _, name, event in first if name == "gone" and isinstance(event, Failed)] == [
        Aborted("").kind
    ]
    assert "gone" not in reported
    assert list(reported["half"]) == [-1]
    assert reported["half"][-1].kind == Aborted("").kind
    assert len(kept) == len(TEXTS)
    assert np.allclose(kept[0], served.expected(TEXTS[0]), atol=1e-5)


def test_a_deadline_fails_its_request_alone(core: EngineCore) -> None:
    """A request past its deadline fails as such; one with time left is answered."""
    core.add(ask("late", *TEXTS, deadline=time.monotonic() - 1))
    core.add(ask("early", *TEXTS, deadline=time.monotonic() + 600))
    reported = take(core)
    assert list(reported["late"]) == [-1]
    assert reported["late"][-1].kind == DeadlineExceeded("").kind
    assert sorted(reported["early"]) == list(range(len(TEXTS)))


@pytest.mark.parametrize(
    ("texts", "said"),
    [(((7,) * 41,), "41 tokens"), (((5,), (7,) * 41), "at most 40"), (((5,), ()), "token"), (((5, 100),), "99")],
)
def test_bad_inputs_are_refused_and_named(core: EngineCore, texts: Any, said: str) -> None:
    """Over-long, empty and unknown tokens fail the whole request once; 40 tokens, the model's limit, are taken."""
    core.add(ask("bad", *texts))
    core.add(ask("good", (7,) * 40))
    reported = take(core)
    assert list(reported["bad"]) == [-1]
    assert said in reported["bad"][-1].message
    if len(texts[-1]) > 40:
        assert reported["bad"][-1].kind == ContextTooLong("").kind
    assert list(reported["good"]) == [0]


def test_an_embedding_model_refuses_to_generate(core: EngineCore) -> None:
    """A completions request to it fails by name, and an embeddings request beside it is answered."""
    core.add(request_of("text", (5, 6)))
    core.add(ask("vector", TEXTS[0]))
    reported = take(core)
    assert (reported["text"][-1].param, "embeddings" in reported["text"][-1].message) == ("task", True)
    assert list(reported["vector"]) == [0]


def test_an_error_is_its_own_requests_alone(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a batch fails, its texts run one by one and only the request at fault is told so."""
    embedder = core.parts.embedder
    embed = embedder.embed

    def failing(texts: Any) -> Any:
        if (9,) in texts:
            raise RuntimeError("no")
        return embed(texts)

    monkeypatch.setattr(embedder, "embed", failing)
    core.add(ask("bad", (5,), (9,), (6,)))
    core.add(ask("good", (5,), (6,)))
    reported = take(core)
    assert reported["bad"][-1].kind == InternalError("").kind
    assert sorted(reported["good"]) == [0, 1]


def test_every_batch_is_a_step(core: EngineCore) -> None:
    """Health counts the batch that empties the queue too."""
    core.add(ask("a", TEXTS[0]))
    take(core)
    assert core.health().steps == 1


def test_it_is_an_embedding_core(core: EngineCore, tiny_bundle: Bundle) -> None:
    """The factory chooses the core by the model's tasks; only a generating one has a KV cache."""
    generating = EngineCore(tiny_bundle, EngineSettings(kv_cache_memory=1 << 24))
    assert (type(core), type(generating)) == (EmbeddingCore, GenerationCore)
    assert core.health().kv_tokens_total == 0 < generating.health().kv_tokens_total
    assert not core.waits
    generating.close()


def test_it_takes_no_adapters(core: EngineCore) -> None:
    """Loading one is refused as a bad field, unloading or asking for one as not found."""
    with pytest.raises(InvalidField, match="this model takes none"):
        core.load_adapter("a", "/nowhere")
    with pytest.raises(NotFound, match="'a' is not loaded"):
        core.unload_adapter("a")
    assert core.adapters() == ()
    core.add(msgspec.structs.replace(ask("asks", TEXTS[0]), adapter="a"))
    assert take(core)["asks"][-1].kind == NotFound("").kind


def test_closing_fails_what_waits(served: Served) -> None:
    """Closing the engine fails every waiting request."""
    core = EngineCore(served.bundle, EngineSettings())
    core.add(ask("a", *TEXTS))
    core.add(ask("b", *TEXTS))
    reported = core.close()
    assert sorted(name for _, name, _ in reported) == ["a", "b"]
    assert all(isinstance(event, Failed) and event.kind == ShuttingDown("").kind for _, _, event in reported)
    assert not core.has_work()


@pytest.mark.parametrize(("change", "cosine"), [({"quantization": "int8"}, 0.98), ({"dtype": "bfloat16"}, 0.99)])
def test_int8_and_bfloat16_stay_near(served: Served, change: dict[str, Any], cosine: float) -> None:
    """Reduced precision keeps the direction of every vector."""
    core = EngineCore(served.bundle, EngineSettings(**change))
    core.add(ask("a", *TEXTS))
    reported = take(core)["a"]
    for index, text in enumerate(TEXTS):
        assert reported[index] @ served.expected(text) > cosine
    core.close()
