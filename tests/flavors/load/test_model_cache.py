"""The model cache: a Hugging Face directory, a GGUF file or a hub id in place of a logged model, logged on the fly."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.load import model_cache
from mlflow_llm.flavors.llm.model import unlogged_source
from mlflow_llm.serving.interface.errors import ModelNotFound, PackagingError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_directory_that_was_not_logged_says_how(llama_dir: Path) -> None:
    """A directory that was not logged is no bundle, and is refused with the two commands to choose from."""
    with pytest.raises(
        MlflowException,
        match=r"is a Hugging Face directory, not a logged model: log it first, with llm"
        r"\.log_model\(model='.*tiny-llama', …\).*mlflow-llm serve -m .*tiny-llama$",
    ):
        llm.load_bundle(llama_dir)


def test_load_model_logs_a_directory_into_the_cache(llama_dir: Path, cache: Path) -> None:
    """``load_model`` takes a Hugging Face directory, as a text or a path, and logs it once."""
    for given in (str(llama_dir), llama_dir):
        with llm.load_model(given, in_process=True) as model:
            assert model.chat("Hi", max_tokens=2).usage.completion_tokens == 2
    assert len(list(cache.iterdir())) == 1


def test_load_model_takes_a_hub_id(llama_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is fetched and logged; one that cannot be fetched is refused by its name."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **_: str(llama_dir))
    with llm.load_model("org/tiny", in_process=True) as model:
        assert "chat" in model.tasks
    monkeypatch.undo()
    with pytest.raises(MlflowException, match="'no/such-thing' is not a local path and could not be fetched"):
        llm.load_model("no/such-thing")


def test_an_adapter_says_what_it_needs(adapter_dir: Path) -> None:
    """An adapter alone is refused with the advice to log it over a base."""
    with pytest.raises(MlflowException, match=r"is a LoRA adapter, not a logged model: log it over its base"):
        llm.load_model(adapter_dir)


@pytest.mark.parametrize(
    ("uri", "reported"),
    [
        ("no/such-thing", "there is no directory 'no/such-thing' here; should it be a hub id: log it first"),
        ("./nowhere", "there is no directory './nowhere'; expected one, models:/<name>/<version>, or a hub id"),
    ],
)
def test_a_missing_path_is_reported(uri: str, reported: str) -> None:
    """A path that does not exist is not found; if it could be a hub id, the error says so."""
    with pytest.raises(MlflowException) as caught:
        llm.load_bundle(uri)
    assert caught.value.message.startswith(reported)
    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_a_gguf_file_says_how(tmp_path: Path) -> None:
    """A GGUF file that was not logged is refused with the command to log it."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(PackagingError, match="is a GGUF file, not a logged model"):
        unlogged_source.check_logged(str(tmp_path / "a.gguf"))


def test_it_is_logged_once_into_the_cache(llama_dir: Path, cache: Path) -> None:
    """The second call finds the first one's copy, which is a model like any other."""
    made = model_cache.logged(str(llama_dir))
    assert made is not None
    assert made.parent == cache
    assert made.name.startswith("tiny-llama-")
    before = (made / "manifest.json").stat().st_mtime_ns
    assert model_cache.logged(str(llama_dir)) == made
    assert (made / "manifest.json").stat().st_mtime_ns == before
    assert "chat" in llm.load_bundle(made).tasks
    assert [path.name for path in cache.iterdir()] == [made.name]


def test_changed_files_are_logged_anew(llama_dir: Path, tmp_path: Path) -> None:
    """Other weights in the same folder are logged as another model."""
    folder = shutil.copytree(llama_dir, tmp_path / "own")
    first = model_cache.logged(str(folder))
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    assert model_cache.logged(str(folder)) != first


def test_two_at_once_make_one(llama_dir: Path, cache: Path) -> None:
    """Two concurrent calls leave one complete copy, and both return it."""
    found: list[Path | None] = []
    threads = [threading.Thread(target=lambda: found.append(model_cache.logged(str(llama_dir)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert llm.load_bundle(found[0]).tasks  # type: ignore[arg-type]
    assert len(list(cache.iterdir())) == 1


def test_a_logged_model_is_not_logged_again(llama_dir: Path, tmp_path: Path) -> None:
    """A logged model and a registry URI are left to the ordinary load."""
    llm.save_model(tmp_path / "saved", model=llama_dir, link_files=True)
    assert model_cache.logged(str(tmp_path / "saved")) is None
    assert model_cache.logged("models:/a/1") is None
    unlogged_source.check_logged(str(tmp_path / "saved"))


def test_a_cache_that_cannot_be_written_is_reported(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in place of the cache directory is an error of one line."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(PackagingError, match="cannot be logged into"):
        model_cache.logged(str(llama_dir))


def test_a_model_that_cannot_be_read_is_reported(llama_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the model that this user may not read is named; the cache is not blamed."""
    weights = str(llama_dir.resolve() / "model.safetensors")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", weights)

    monkeypatch.setattr("mlflow_llm.flavors.llm.save.save_model.save_model", refused)
    with pytest.raises(PackagingError) as caught:
        model_cache.logged(str(llama_dir))
    assert str(caught.value) == f"{llama_dir} cannot be read: {weights}: Permission denied"


@pytest.mark.parametrize("below", [False, True])
def test_a_cache_writable_by_others_is_refused(llama_dir: Path, cache: Path, below: bool) -> None:
    """A cached copy is used only if no other user can write to its directories."""
    place = model_cache.logged(str(llama_dir)) if below else cache
    assert place is not None
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o777)
    with pytest.raises(PackagingError, match="models are not loaded from a directory that other users could have wr"):
        model_cache.logged(str(llama_dir))
    place.chmod(0o755)
    assert model_cache.logged(str(llama_dir)) is not None


def test_a_link_to_anothers_copy(llama_dir: Path, cache: Path, tmp_path: Path) -> None:
    """A symbolic link in place of the cached copy is not followed."""
    made = model_cache.logged(str(llama_dir))
    assert made is not None
    made.rename(tmp_path / "elsewhere")
    made.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackagingError, match="models are not loaded"):
        model_cache.logged(str(llama_dir))


def test_not_found_is_a_packaging_error() -> None:
    """ModelNotFound is a PackagingError, so that callers of either class catch it."""
    assert issubclass(ModelNotFound, PackagingError)
