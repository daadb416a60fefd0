"""A server's app over the engine that needs no weights, with a small byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.engine.instant import InstantEngine
from mlflow_llm.serving.settings import EngineSettings
from mlflow_llm.serving.tasks.endpoint import EndpointView
from mlflow_llm.serving.tasks.text import TextModel
from mlflow_llm.serving.web.app import create_app, make_server
from mlflow_llm.serving.web.endpoints import Endpoint, Endpoints
from mlflow_llm.serving.web.invoke import Server
from mlflow_llm.serving.web.settings import ServerSettings

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_instant_model(root: Path, **model: float) -> Bundle:
    """A bundle of ``InstantEngine`` in ``root``: a 259-token byte tokenizer and no weights."""
    import json

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(root / "tokenizer")
    (root / "model").mkdir()
    (root / "model" / "instant.json").write_text(json.dumps({"vocab_size": len(tokenizer), **model}))
    return Bundle(
        content_hash=f"instant-{root.name}",
        tasks=("chat", "completions", "embeddings"),
        model_dir=str(root / "model"),
        tokenizer_dir=str(root / "tokenizer"),
        adapters={"pirate": str(root / "model")},
    )


@pytest.fixture(scope="session")
def instant_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_instant_model(tmp_path_factory.mktemp("instant"))


@pytest.fixture(scope="session")
def instant_text(instant_bundle: Bundle) -> TextModel:
    return TextModel(instant_bundle)


@pytest.fixture
def make(instant_bundle: Bundle, instant_text: TextModel) -> Callable[..., Server]:
    """``make(keys=…, mode=…, **server_settings)``: a server with one endpoint, ``assistant``."""

    def build(keys: object = None, mode: object = None, **settings: object) -> Server:
        engine = InstantEngine(instant_bundle, EngineSettings(max_model_len=4096))
        view = EndpointView(
            name="assistant",
            info=engine.info,
            text=instant_text,
            adapters=lambda: tuple(a.name for a in engine.adapters()),
            names=("model-1",),
        )
        endpoint = Endpoint(name="assistant", entity="model-1", view=view, engine=engine, mode=mode, created=1)
        return make_server(Endpoints(endpoint), ServerSettings(**settings), keys=keys)

    return build


@pytest.fixture
def server(make: Callable[..., Server]) -> Server:
    return make()


@pytest.fixture
def client(server: Server) -> FlaskClient:
    return create_app(server).test_client()
