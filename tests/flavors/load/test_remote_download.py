"""Models of a remote store: downloaded once into the cache, verified, and held as long as they are used."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import mlflow
import pytest
from flavor_models import add_lora, tiny_llama
from mlflow.exceptions import MlflowException
from remote_store import RemoteStore, remote_store

from mlflow_llm.flavors import llm
from mlflow_llm.serving.model_files import downloads

URI = "models:/assistant/1"
PATIENCE = 900  # seconds for another process to import MLflow and begin
LOAD = "import sys; from mlflow_llm.flavors import llm; print(llm.load_bundle(sys.argv[1]).model_dir, flush=True)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, and an empty directory for temporary files."""
    monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "downloads"


@pytest.fixture
def remote(tmp_path: Path, cache: Path, llama_dir: Path):
    """Return a remote store with models:/assistant/1."""
    with remote_store(tmp_path) as server:
        with mlflow.start_run():
            llm.log_model(llama_dir, name="m", registered_model_name="assistant")
        yield server


def models(cache: Path) -> list[str]:
    """Return the names of the downloads that are whole."""
    return sorted(path.name for path in cache.iterdir() if path.is_dir() and path.suffix != ".part")


def temporary() -> list[str]:
    """Return the weights that are left in the directory for temporary files."""
    return [str(path) for path in Path(tempfile.gettempdir()).rglob("*.safetensors")]


def start(code: str, uri: str = URI) -> subprocess.Popen[str]:
    """Run ``code`` in another process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, uri], text=True, **pipes)


def test_loaded_twice_is_downloaded_once(remote: RemoteStore, cache: Path) -> None:
    """Two loads fetch the weights once, leave nothing in the temporary directory, and both answer."""
    texts = []
    for _ in range(2):
        with llm.load_model(URI, in_process=True) as model:
            texts.append(model.complete("Once", max_tokens=4, temperature=0))
    assert remote.weights() == ["model.safetensors"]
    assert len(models(cache)) == 1
    assert temporary() == []
    assert str(texts[0]) == str(texts[1])


def test_every_kind_of_uri_is_one_download(remote: RemoteStore, cache: Path) -> None:
    """An alias, a version, the logged model and the artifact's own address share one copy."""
    mlflow.MlflowClient().set_registered_model_alias("assistant", "champion", "1")
    (logged,) = mlflow.search_logged_models(output_format="list")
    uris = (URI, "models:/assistant@champion", f"models:/{logged.model_id}", logged.artifact_location)
    roots = {llm.load_bundle(uri).model_dir for uri in uris}
    assert len(roots) == 1
    assert remote.weights() == ["model.safetensors"]


def test_a_run_is_downloaded_once(remote: RemoteStore, cache: Path) -> None:
    """``runs:/`` URIs, of which MLflow always makes a copy, are in the cache, too."""
    for _ in range(2):
        llm.load_bundle(f"runs:/{_run()}/m")
    assert remote.weights() == ["model.safetensors"]
    assert temporary() == []


def test_a_local_store_is_used_in_place(store: str, llama_dir: Path, cache: Path) -> None:
    """A model on this machine is not copied."""
    llm.log_model(llama_dir, name="m", registered_model_name="assistant")
    assert not llm.load_bundle(URI).model_dir.startswith(str(cache))
    assert not cache.exists()


def test_a_killed_download_is_continued(remote: RemoteStore, cache: Path) -> None:
    """A process that is killed in the middle leaves no model; the next one fetches only what is missing."""
    remote.slow = {"model.safetensors"}
    process = start(LOAD)
    assert remote.waiting.wait(PATIENCE)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert models(cache) == []
    (part,) = cache.glob("*.part")
    whole = {path.relative_to(part).as_posix() for path in part.rglob("*.*") if ".scratch" not in str(path)}
    assert "model/model.safetensors" not in whole
    remote.open.set()
    remote.fetched.clear()
    bundle = llm.load_bundle(URI)
    again = {path for path in whole if any(fetched.endswith(f"/{path}") for fetched in remote.fetched)}
    assert remote.weights() == ["model.safetensors"]
    assert again == set()
    assert Path(bundle.model_dir, "model.safetensors").is_file()
    assert len(list(cache.iterdir())) == 2


def test_damaged_files_are_refused(remote: RemoteStore, cache: Path) -> None:
    """A file whose bytes are not those that were logged is named, also if its size is right, and is not kept."""
    (weights,) = remote.folder.rglob("model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(MlflowException, match=r"model/model\.safetensors was changed: its SHA-256"):
        llm.load_bundle(URI)
    assert models(cache) == []
    data[-1] ^= 1
    weights.write_bytes(data)
    llm.load_bundle(URI)


def test_another_flavor_is_named(remote: RemoteStore) -> None:
    """A model that this flavor did not save is refused as such."""

    class Echo(mlflow.pyfunc.PythonModel):
        def predict(self, context, model_input: list[str]) -> list[str]:
            return model_input

    mlflow.pyfunc.log_model(name="echo", python_model=Echo(), registered_model_name="echo", pip_requirements=[])
    with pytest.raises(MlflowException, match=r"manifest\.json is missing in models:/echo/1: this is not a model"):
        llm.load_bundle("models:/echo/1")


def test_a_closed_model_is_let_go(remote: RemoteStore, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that has closed a model, or lost it, no longer keeps its files."""
    monkeypatch.setenv("MLFLOW_LLM_DOWNLOADS_LIMIT", "1")
    kept, lost = llm.load_model(URI, in_process=True), llm.load_model(URI, in_process=True)
    downloads.make_room(0)
    assert len(models(cache)) == 1
    kept.close()
    downloads.make_room(0)
    assert len(models(cache)) == 1
    del lost
    gc.collect()
    downloads.make_room(0)
    assert models(cache) == []


def test_a_wrong_limit_is_named(remote: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is no size is refused by its name."""
    monkeypatch.setenv("MLFLOW_LLM_DOWNLOADS_LIMIT", "much")
    with pytest.raises(MlflowException, match="MLFLOW_LLM_DOWNLOADS_LIMIT: 'much' is not a number of bytes"):
        llm.load_bundle(URI)


def test_an_adapter_alone_has_its_base_from_the_cache(remote: RemoteStore, cache: Path, tmp_path: Path) -> None:
    """The base is fetched once for all adapters that were logged alone over it."""
    for number in (2, 3):
        add_lora(tiny_llama(), seed=number).save_pretrained(tmp_path / f"lora{number}")
        llm.log_model(
            name="a",
            base=URI,
            adapters={"one": tmp_path / f"lora{number}"},
            default_adapter="one",
            registered_model_name="adapter",
        )
    remote.fetched.clear()
    for version in (1, 2):
        with llm.load_model(f"models:/adapter/{version}", in_process=True) as model:
            assert model.complete("Once", max_tokens=2)
    assert remote.weights() == ["adapter_model.safetensors"] * 2


def test_equal_weights_are_linked(remote: RemoteStore, cache: Path, llama_dir: Path, adapter_dir: Path) -> None:
    """A version with an adapter beside the same weights downloads the adapter only."""
    llm.load_bundle(URI)
    remote.fetched.clear()
    llm.log_model(llama_dir, name="m", adapters={"formal": adapter_dir}, registered_model_name="assistant")
    bundle = llm.load_bundle("models:/assistant/2")
    assert remote.weights() == ["adapter_model.safetensors"]
    assert Path(bundle.model_dir, "model.safetensors").stat().st_nlink == 2


def test_mlflow_load_leaves_no_copy(remote: RemoteStore, cache: Path) -> None:
    """A download of ``mlflow.pyfunc.load_model`` is moved to the cache, and no second copy remains beside it."""
    for _ in range(2):
        model = mlflow.pyfunc.load_model(URI, model_config={"in_process": True})
        with llm.closing(model):
            assert model.predict({"prompt": "Once", "max_tokens": 2})
        assert temporary() == []
    assert len(models(cache)) == 1


def test_mlflow_load_of_a_process_leaves_nothing(remote: RemoteStore, cache: Path) -> None:
    """When the process ends, MLflow's temporary directory is gone, too."""
    code = f"import sys, mlflow; [mlflow.pyfunc.load_model(uri) for uri in (sys.argv[1], 'runs:/{_run()}/m')]"
    process = start(code)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert list(Path(tempfile.gettempdir()).rglob("MLmodel")) == []


def _run() -> str:
    (logged,) = mlflow.search_logged_models(output_format="list")
    return str(logged.source_run_id)


def test_a_users_copy_stays(remote: RemoteStore, cache: Path, tmp_path: Path) -> None:
    """A directory that the caller chose is left as it is, in MLflow's loader and in ours."""
    for number, load in enumerate((mlflow.pyfunc.load_model, llm.load_model)):
        folder = Path(tempfile.mkdtemp())
        llm.close(load(URI, dst_path=str(folder)))
        assert list(folder.rglob("model.safetensors")), number
        llm.close(load(str(folder)))
        assert list(folder.rglob("model.safetensors")), number
