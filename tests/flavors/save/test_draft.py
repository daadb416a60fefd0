"""A draft model as a setting, and predictions: the same text, with counts of drafts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from flavor_models import TEMPLATE, byte_tokenizer, tiny_llama
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle
from mlflow_llm.serving.control.mlflow_resolver import ResolvedModel, with_drafts
from mlflow_llm.serving.control.model_sources import locate
from mlflow_llm.serving.endpoints.config import EntityConfig
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.settings import EngineSettings

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a model that the native kernels run and two smaller ones, the last with other tokens."""
    found = {}
    tokenizer, other = byte_tokenizer(chat_template=TEMPLATE), byte_tokenizer(chat_template=TEMPLATE)
    other.add_tokens(["another"])
    for name, layers, tokens in (("large", 4, tokenizer), ("small", 1, tokenizer), ("other", 1, other)):
        found[name] = tmp_path_factory.mktemp(name) / name
        tiny_llama(hidden_size=64, num_hidden_layers=layers).save_pretrained(found[name])
        tokens.save_pretrained(found[name])
    return found


@pytest.fixture
def saved(folders: dict[str, Path], tmp_path: Path) -> str:
    """Log the large model with the small one's directory as its setting."""
    llm.save_model(tmp_path / "model", model=folders["large"], draft_model=str(folders["small"]))
    return str(tmp_path / "model")


@pytest.mark.skipif(library.library() is None, reason="speculation is the native step's")
def test_a_model_with_a_draft_model(saved: str, folders: dict[str, Path]) -> None:
    """A saved draft model, logged or a plain directory, and a prediction leave the text as it is, and the reply counts
    proposed and accepted drafts."""
    body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0.7, "seed": 3}
    plain = llm.load_model(saved, draft_model=None, speculation="none", in_process=True)
    with llm.closing(plain):
        wanted = plain.chat(**body)
    drafting = llm.load_model(saved, in_process=True)
    with llm.closing(drafting):
        text = wanted.choices[0].text
        found = drafting.chat(**body, prediction={"type": "content", "content": text})
        guessed = drafting.chat(**body)
    assert guessed.choices[0].text == found.choices[0].text == text
    usage = found.usage
    assert usage.accepted_prediction_tokens is not None
    assert 0 < usage.accepted_prediction_tokens <= usage.accepted_draft_tokens <= usage.draft_tokens
    assert guessed.usage.draft_tokens > 0
    assert guessed.usage.accepted_prediction_tokens is None


def test_another_vocabulary(saved: str, folders: dict[str, Path]) -> None:
    """A draft model with another vocabulary is refused when the engine starts, by a differing token."""
    model = llm.load_model(saved, draft_model=str(folders["other"]), in_process=True)
    with llm.closing(model), pytest.raises(MlflowException, match="'another' has no id in this model"):
        model.chat(MESSAGES, max_tokens=1)


def test_a_missing_draft_model_is_refused_at_load(saved: str) -> None:
    """A missing draft model is refused when the model is loaded."""
    with pytest.raises(MlflowException, match="nowhere"):
        llm.load_model(saved, draft_model="/nowhere/at/all")


def test_served_models(saved: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """A server resolves each draft model once, by its own settings or a model's, and refuses an embedding model."""
    llm.save_model(tmp_path / "small", model=folders["small"])
    large, small = read_bundle(Path(saved)), read_bundle(tmp_path / "small")
    asked = []

    def find(uris: tuple[str, ...]) -> tuple[ResolvedModel, ...]:
        asked.append(uris)
        return tuple(ResolvedModel(bundle=small if uri == "models:/small/1" else large, uri=uri) for uri in uris)

    drafted = EngineSettings(draft_model="models:/small/1")
    found = with_drafts([large, large, large], [drafted, EngineSettings(), drafted], find)
    assert asked == [("models:/small/1",)]
    assert [bundle.draft and bundle.draft.content_hash for bundle in found] == [
        small.content_hash, None, small.content_hash
    ]  # fmt: skip
    entity = EntityConfig(
        name="a", entity_name="models:/large/1", entity_version="", engine_settings={"draft_model": "models:/small/1"}
    )
    (source,) = locate((entity,), {}, find=find)
    assert source.bundle.draft is not None
    small = msgspec.structs.replace(small, tasks=("embeddings",))
    with pytest.raises(InvalidField, match="does embeddings; expected a model that writes text"):
        locate((entity,), {}, find=find)
