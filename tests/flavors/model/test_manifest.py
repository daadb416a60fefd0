"""The manifest: its records, and the refusal to load a model that differs from what was saved."""

import hashlib
import json
import shutil

import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm


@pytest.fixture(scope="module")
def saved(tmp_path_factory, llama_dir, adapter_dir):
    root = tmp_path_factory.mktemp("saved") / "m"
    llm.save_model(root, llama_dir, adapters={"formal": adapter_dir}, chat_template={"default": "x{{ messages }}"})
    return root


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "m")
    return tmp_path / "m"


def test_records_every_file(saved):
    """Each file of model, tokenizer, adapters and templates stands in the manifest with size and SHA-256."""
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["format_version"] == 1
    assert manifest["tasks"] == ["chat", "completions"]
    folders = [saved / "model", saved / "tokenizer", saved / "adapters"]
    files = [f for folder in folders for f in folder.rglob("*") if f.is_file()] + [saved / "chat_template.jinja"]
    assert set(manifest["files"]) == {f.relative_to(saved).as_posix() for f in files}
    for file in files:
        entry = manifest["files"][file.relative_to(saved).as_posix()]
        assert entry == {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def test_same_content_same_hash(saved, tmp_path, llama_dir, adapter_dir):
    """The content hash follows the content alone."""
    template = {"default": "x{{ messages }}"}
    llm.save_model(tmp_path / "a", llama_dir, adapters={"formal": adapter_dir}, chat_template=template)
    llm.save_model(tmp_path / "b", llama_dir, chat_template=template)
    first = llm.load_bundle(saved).content_hash
    assert llm.load_bundle(tmp_path / "a", verify="full").content_hash == first
    assert llm.load_bundle(tmp_path / "b").content_hash != first


def test_nothing_absolute_is_stored(copied, saved, llama_dir, tmp_path):
    """A moved model loads, and none of its files names the machine's folders."""
    shutil.move(copied, tmp_path / "elsewhere")
    bundle = llm.load_bundle(tmp_path / "elsewhere", verify="full")
    assert bundle.model_dir == str(tmp_path / "elsewhere/model")
    assert bundle.adapters == {"formal": str(tmp_path / "elsewhere/adapters/formal")}
    for file in (f for f in saved.rglob("*") if f.is_file() and f.suffix not in (".safetensors", ".whl")):
        text = file.read_text()
        assert str(saved.parent) not in text
        assert str(llama_dir) not in text


def test_changed_size(copied):
    """A file of another size is found on every load."""
    with (copied / "model/model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(MlflowException, match=r"model/model\.safetensors has \d+ bytes, manifest\.json says \d+"):
        llm.load_bundle(copied)


def test_changed_bytes(copied, monkeypatch):
    """A change that keeps the size is found by full verification, by argument or environment variable."""
    file = copied / "adapters/formal/adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    llm.load_bundle(copied)
    with pytest.raises(MlflowException, match="SHA-256"):
        llm.load_bundle(copied, verify="full")
    monkeypatch.setenv("MLFLOW_LLM_VERIFY", "full")
    with pytest.raises(MlflowException, match=r"adapters/formal/adapter_model\.safetensors was changed"):
        llm.load_bundle(copied)


def test_missing_file(copied):
    """A missing file is named."""
    (copied / "tokenizer/tokenizer.json").unlink()
    with pytest.raises(MlflowException, match=r"tokenizer/tokenizer\.json is missing"):
        llm.load_bundle(copied)


@pytest.mark.parametrize("name", ["model/pytorch_model.bin", "model/extra.safetensors", "adapters/new/x.json"])
def test_added_file(copied, name):
    """An added file is refused, because a loader might read it."""
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).write_bytes(b"x")
    with pytest.raises(MlflowException, match=r"is not in manifest\.json"):
        llm.load_bundle(copied)


def test_edited_manifest(copied):
    """An edited manifest entry is found by the content hash."""
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["files"]["chat_template.jinja"]["sha256"] = "0" * 64
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MlflowException, match="content hash does not match"):
        llm.load_bundle(copied)


def test_unreadable_manifests(copied):
    """A later format, a broken file and a missing one are each reported."""
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(MlflowException, match=r"format version 99.*install a later one"):
        llm.load_bundle(copied)
    (copied / "manifest.json").write_text("{")
    with pytest.raises(MlflowException, match="cannot be read"):
        llm.load_bundle(copied)
    (copied / "manifest.json").unlink()
    with pytest.raises(MlflowException, match="not a model saved by mlflow-llm"):
        llm.load_bundle(copied)


def test_verify_is_one_of_two(copied):
    """An unknown value of verify is refused."""
    with pytest.raises(MlflowException, match=r'expected "size" or "full"'):
        llm.load_bundle(copied, verify="none")
