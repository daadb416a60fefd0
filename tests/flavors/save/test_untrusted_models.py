"""Untrusted models: nothing in their files hangs, fills or reads this machine."""

import json
import os
import shutil

import pytest
from flavor_models import TEMPLATE
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.save import checkpoints
from mlflow_llm.serving.sandbox import CHECK
from mlflow_llm.serving.tasks.prompt import tokenizer_check
from mlflow_llm.serving.tasks.prompt.text import TextModel

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def source(tmp_path, llama_dir):
    shutil.copytree(llama_dir, tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def adapter(tmp_path, adapter_dir):
    shutil.copytree(adapter_dir, tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def refused(tmp_path):
    """Provide ``refused(model, **options)``, which returns the error of saving it; nothing is left behind."""

    def run(model, **options):
        with pytest.raises(MlflowException) as caught:
            llm.save_model(tmp_path / "m", model, **options)
        assert not (tmp_path / "m").exists()
        assert len(caught.value.message) < 500
        return caught.value.message

    return run


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        (LOOP, "seconds of CPU time"),
        ("{{ 'a' * 10**10 }}", "MiB of memory"),
        ("{{ 'a' * 2 * 10**6 }}" * 4, "out"),
    ],
)
def test_a_template_that_takes_too_much(refused, source, template, limit):
    """Nested loops and huge strings end at a limit when a model is logged."""
    message = refused(source, chat_template=template)
    assert "chat_template 'default': it was stopped: it took more than" in message
    assert limit in message


def test_a_template_too_long(refused, source):
    """A template of megabytes is refused by its length."""
    assert "at most 1048576" in refused(source, chat_template="{{ messages }}" + "a" * 2_000_000)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**6}, {"num_hidden_layers": 10**12}])
def test_a_million_layers(refused, source, changes):
    """More layers than the weights could hold are refused before any is built."""
    edit(source / "config.json", **changes)
    assert "config.json: num_hidden_layers: 10" in refused(source)


@pytest.mark.parametrize("changes", [{"intermediate_size": 10**9}, {"vocab_size": 10**15}, {"hidden_size": 10**12}])
def test_terabytes_of_parameters(refused, source, changes):
    """A configuration that asks for more than its weights hold is refused, without the memory."""
    edit(source / "config.json", **changes)
    assert "model: " in refused(source)


def test_a_hub_kernel_as_attention_is_ignored(tmp_path, source):
    """A configuration that names a hub kernel as its attention is built with transformers' own attention."""
    edit(source / "config.json", attn_implementation="nobody/kernel", _attn_implementation="nobody/kernel")
    llm.save_model(tmp_path / "m", source)
    assert llm.load_bundle(tmp_path / "m").tasks


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
def test_patterns_that_backtrack_for_ever(refused, source, adapter, key):
    """An adapter's regular expression that would never end is stopped, and file and key are named."""
    edit(adapter / "adapter_config.json", **{key: {r"([a-z_.0-9]+)+\d!": 8}})
    message = refused(source, adapters={"own": adapter})
    assert f"adapter_config.json: {key}: its regular expressions took more than 5 seconds" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alpha_pattern": {"(": 8}}, "alpha_pattern: missing )"),
        ({"alpha_pattern": ["q_proj"]}, "expected an object"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern['q_proj']: '8' is not allowed"),
        ({"rank_pattern": {"q_proj": 0}}, "expected an integer above 0"),
        ({"r": "four"}, "r: 'four' is not allowed"),
        ({"r": 0}, "r: 0 is not allowed"),
        ({"lora_alpha": None}, "lora_alpha: None is not allowed"),
        ({"peft_type": ["x"] * 1000}, "is not supported"),
    ],
)
def test_configurations_of_adapters(refused, source, adapter, changes, reason):
    """Invalid patterns and numbers in an adapter's configuration are refused by key."""
    edit(adapter / "adapter_config.json", **changes)
    assert reason in refused(source, adapters={"own": adapter})


def test_patterns_are_pefts(tmp_path, source, adapter):
    """Regular expressions are matched as peft matches them."""
    edit(adapter / "adapter_config.json", alpha_pattern={r"layers\.(0|1)\.self_attn\.[qv]_proj": 3, "q_proj": 5})
    llm.save_model(tmp_path / "m", source, adapters={"own": adapter})
    from mlflow_llm.serving.engine.adapters.files import read_adapter

    files = read_adapter(tmp_path / "m/adapters/own")
    assert {module.scaling * module.rank for module in files.modules.values()} == {3.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}] * 12}}, "it was stopped"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 500}}, "tokens of"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
         "it cannot be read"),
        ({"post_processor": {"type": "nothing"}}, "it cannot be read"),
    ],
)  # fmt: skip
def test_tokenizers_that_take_too_much(refused, source, monkeypatch, changes, reason):
    """Normalizers that multiply a text, broken expressions and unknown parts are refused when a model is logged."""
    monkeypatch.setattr(tokenizer_check, "CHECK", type(CHECK)(seconds=5.0, memory=1 << 30, output=1 << 20))
    edit(source / "tokenizer.json", **changes)
    message = refused(source)
    assert "tokenizer.json: " in message
    assert reason in message


def test_a_tokenizer_is_checked_when_loaded(tmp_path, source):
    """A tokenizer replaced in a saved model is refused before it is loaded."""
    llm.save_model(tmp_path / "m", source)
    bundle = llm.load_bundle(tmp_path / "m")
    edit(tmp_path / "m/tokenizer/tokenizer.json", post_processor={"type": "nothing"})
    with pytest.raises(ValueError, match=r"tokenizer\.json: it cannot be read"):
        TextModel(bundle)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "adapter_config.json",
        "adapter_model.safetensors",
        "notes.txt",
    ],
)
def test_links_out_of_a_model(refused, tmp_path, source, adapter, name):
    """A link in a model or an adapter that points at a file elsewhere is not followed."""
    folder = adapter if name.startswith("adapter_") else source
    (tmp_path / "secret").write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    assert f"{name} is a symbolic link that leaves" in refused(source, adapters={"own": adapter})


def test_links_within_a_model(tmp_path, source):
    """Links inside a directory, and those of the hub's cache to its blobs, are followed."""
    (source / "weights").mkdir()
    shutil.move(source / "model.safetensors", source / "weights/a")
    (source / "model.safetensors").symlink_to("weights/a")
    llm.save_model(tmp_path / "a", source)
    snapshot, blobs = tmp_path / "models--x/snapshots/1", tmp_path / "models--x/blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(f for f in source.iterdir() if f.is_file()):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    llm.save_model(tmp_path / "b", snapshot)
    assert llm.load_bundle(tmp_path / "a").content_hash == llm.load_bundle(tmp_path / "b").content_hash


def test_links_out_of_a_saved_model(tmp_path, source):
    """A file of a saved model replaced by a link out of it is refused when it is loaded."""
    llm.save_model(tmp_path / "m", source)
    shutil.move(tmp_path / "m/model/config.json", tmp_path / "elsewhere")
    (tmp_path / "m/model/config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MlflowException, match=r"model/config\.json is a symbolic link that leaves the model"):
        llm.load_bundle(tmp_path / "m")


def test_the_environment_is_covered(tmp_path, source):
    """Requirements and the wheel are in the manifest: changed, added and removed ones are found."""
    llm.save_model(tmp_path / "m", source)
    manifest = json.loads((tmp_path / "m/manifest.json").read_text())
    (wheel,) = (path for path in manifest["environment"] if path.startswith("wheels/"))
    assert {"requirements.txt", "conda.yaml", "python_env.yaml", wheel} == set(manifest["environment"])
    for name in ("requirements.txt", wheel):
        shutil.copytree(tmp_path / "m", tmp_path / "changed")
        data = bytearray((tmp_path / "changed" / name).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "changed" / name).write_bytes(data)
        with pytest.raises(MlflowException, match=f"{name} was changed: its SHA-256"):
            llm.load_bundle(tmp_path / "changed")
        shutil.rmtree(tmp_path / "changed")
    added = tmp_path / "m" / os.path.dirname(wheel) / "torch-99-py3-none-any.whl"
    added.write_bytes(b"x")
    with pytest.raises(MlflowException, match=r"torch-99.*is not in manifest"):
        llm.load_bundle(tmp_path / "m")
    added.unlink()
    (tmp_path / "m" / wheel).unlink()
    with pytest.raises(MlflowException, match="is missing"):
        llm.load_bundle(tmp_path / "m")


def test_models_of_the_release_before(tmp_path, source):
    """A model saved before manifests covered the environment loads."""
    llm.save_model(tmp_path / "m", source)
    manifest = json.loads((tmp_path / "m/manifest.json").read_text())
    del manifest["environment"]
    (tmp_path / "m/manifest.json").write_text(json.dumps(manifest))
    assert llm.load_bundle(tmp_path / "m").tasks


@pytest.mark.parametrize(
    "line",
    [
        "-r other.txt",
        "--requirement=other.txt",
        "https://example.org/a.whl",
        "einops @ https://example.org/a.whl",
        "git+https://example.org/a",
        "--index-url https://example.org/simple",
        "--find-links wheels",
        "-e .",
        "./a.whl",
    ],
)
@pytest.mark.parametrize("option", ["pip_requirements", "extra_pip_requirements", "conda_env"])
def test_requirements_by_name_and_version_alone(refused, source, tmp_path, line, option):
    """Files, URLs and indexes in requirements are refused, as a list and in a file."""
    if option == "conda_env":
        given = {"dependencies": ["python=3.11", {"pip": ["mlflow", line]}]}
    else:
        given = tmp_path / "requirements.txt"
        given.write_text(f"mlflow  # the store\n{line}\n")
        assert "is not allowed; expected a package's name and version" in refused(source, **{option: str(given)})
        given = ["mlflow", line]
    message = refused(source, **{option: given})
    assert "is not allowed; expected a package's name and version" in message
    assert line[:60] in message


@pytest.mark.parametrize("uri", ["http://127.0.0.1:1/m", "ftp://host/m", "file:///etc", "/etc", "models:/../../etc"])
def test_a_base_is_where_models_are(tmp_path, source, adapter, uri, monkeypatch):
    """A base that is a path, or anything but a registered or logged model, is not followed at load."""
    llm.save_model(tmp_path / "m", source, adapters={"own": adapter})
    file = tmp_path / "m/manifest.json"
    edit(file, base={"uri": uri, "content_hash": "0" * 64})
    shutil.rmtree(tmp_path / "m/model")
    manifest = json.loads(file.read_text())
    kept = {path: entry for path, entry in manifest["files"].items() if not path.startswith("model/")}
    from mlflow_llm.flavors.llm.model import manifest as manifests

    entries = {path: manifests.FileEntry(**entry) for path, entry in kept.items()}
    edit(file, files=kept, content_hash=manifests.content_hash_of(entries))
    fetched = []
    monkeypatch.setattr("mlflow.artifacts.download_artifacts", lambda **asked: fetched.append(asked))
    with pytest.raises(MlflowException, match=r"manifest\.json: base: .* is not allowed; expected models:"):
        llm.load_bundle(tmp_path / "m")
    assert not fetched


@pytest.mark.parametrize(
    "path",
    ["adapters/../../x/adapter_config.json", "adapters/.x/a", "adapters/a b/x", "/etc/passwd", "model/../x", "other/x"],
)
def test_paths_in_a_manifest(tmp_path, source, path):
    """A manifest with paths out of the model or invalid adapter names is refused."""
    llm.save_model(tmp_path / "m", source)
    manifest = json.loads((tmp_path / "m/manifest.json").read_text())
    edit(tmp_path / "m/manifest.json", files=manifest["files"] | {path: {"size": 1, "sha256": "0"}})
    with pytest.raises(MlflowException, match=r"manifest\.json: .*(is not the path|name .* is not allowed)"):
        llm.load_bundle(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00[]"),
        ("config.json", b"[" * 100_000),
        ("config.json", b"\xff\xfe"),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("model.gguf", b"GGUF" + b"\x00" * 50),
    ],
)
def test_broken_files(refused, source, name, data):
    """A broken file of any library gives a one-line error that names it or its kind."""
    (source / name).write_bytes(data)
    message = refused(source / name if name.endswith(".gguf") else source)
    assert "\n" not in message
    assert name.partition(".")[0].partition("_")[0] in message


def test_a_broken_pickle(tmp_path):
    """A pickle that is not a checkpoint is refused by its name, whatever torch raises."""
    for data in (b"", b"\x80\x05", b"PK\x03\x04" + b"\x00" * 64, b"\x80\x02}q\x00X" * 9):
        (tmp_path / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be converted"):
            checkpoints.convert(tmp_path / "pytorch_model.bin", tmp_path / "out.safetensors")


def test_an_ordinary_template_is_saved(tmp_path, source):
    """An ordinary template passes all these checks."""
    llm.save_model(tmp_path / "m", source, chat_template=TEMPLATE)
    assert "chat" in llm.load_bundle(tmp_path / "m").tasks
