"""``log_model`` as in MLflow: the signature, settings and requirements of a logged model."""

import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import mlflow
import pandas as pd
import pytest
import yaml
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.models.utils import _enforce_schema
from mlflow.types import ColSpec, DataType, Schema
from packaging.requirements import Requirement

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model import bundle_reader, model_config, signature
from mlflow_llm.flavors.llm.save import wheel as own_wheel
from mlflow_llm.serving.dialects import FIELDS
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings


def test_log_and_register(store, llama_dir):
    """A run gets a logged model with params and tags, registered; its flavors say how to load it."""
    with mlflow.start_run():
        info = llm.log_model(
            llama_dir,
            name="assistant",
            registered_model_name="assistant",
            params={"epochs": 3},
            tags={"team": "a"},
            model_type="assistant",
            step=4,
            metadata={"license": "mit"},
        )
    logged = mlflow.get_logged_model(info.model_id)
    assert (logged.name, logged.model_type, logged.params["epochs"]) == ("assistant", "assistant", "3")
    assert logged.tags["team"] == "a"
    assert info.registered_model_version == 1
    saved = Model.load("models:/assistant/1")
    assert saved.metadata == {"task": "llm/v1/chat", "license": "mit"}
    assert saved.flavors["llm"]["tasks"] == ["chat", "completions"]
    pyfunc = saved.flavors["python_function"]
    assert (pyfunc["loader_module"], pyfunc["streamable"]) == ("mlflow_llm.flavors.llm", True)
    assert llm.load_bundle("models:/assistant/1", verify="full").tasks == ("chat", "completions")
    assert llm.load_bundle(info.model_uri).content_hash == saved.flavors["llm"]["content_hash"]


def test_prompts_are_linked(store, llama_dir):
    """Prompts of the registry are linked to the logged model."""
    prompt = mlflow.genai.register_prompt("greet", "Say hello to {{ name }}")
    with mlflow.start_run():
        info = llm.log_model(llama_dir, name="m", prompts=[prompt])
    assert info.prompts == ["prompts:/greet/1"]


def test_flavor_module_form(store, llama_dir):
    """``Model.log(flavor=module)`` works, as MLflow's own callers use it."""
    info = Model.log(artifact_path=None, name="m", flavor=llm, model=llama_dir)
    assert llm.load_bundle(info.model_uri).tasks == ("chat", "completions")


def test_a_refusal_is_short(store, llama_dir):
    """A refusal from log_model is an MlflowException of one line with status 400."""
    with pytest.raises(MlflowException) as caught:
        llm.log_model(llama_dir, name="m", task="translate")
    assert caught.value.get_http_status_code() == 400
    assert (
        caught.value.message == "task: 'translate' is not allowed; expected one of chat, completions, embeddings, score"
    )
    assert caught.value.__suppress_context__


def test_default_example_is_saved_and_not_run(store, llama_dir, monkeypatch):
    """Without an example a default one is stored, and no engine is started to try it."""

    def refuse(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("mlflow.pyfunc.load_model", refuse)
    monkeypatch.setattr(llm, "_load_pyfunc", refuse)
    info = llm.log_model(llama_dir, name="m")
    example = mlflow.models.Model.load(info.model_uri).load_input_example(info.artifact_path)
    assert example["messages"][0]["role"] == "user"
    info = llm.log_model(llama_dir, name="m", input_example=False)
    assert info.saved_input_example_info is None


def test_example_of_the_caller_is_kept(tmp_path, llama_dir):
    """An example given is the one saved, as JSON with its nested values."""
    given = {"messages": [{"role": "user", "content": "Hi"}], "stop": "x", "logit_bias": {"5": 1.5}}
    llm.save_model(tmp_path / "m", llama_dir, input_example=given)
    assert json.loads((tmp_path / "m/input_example.json").read_text()) == given


def test_signature_loses_nothing():
    """Every field of every task passes MLflow's schema as it came, nested values and odd types included."""
    schema = signature.lossless_signature().inputs
    request = {name: 0 for names in FIELDS.values() for name in names} | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "tool", "x": None}],
        "tools": [{"type": "function", "function": {"parameters": {"properties": {"a": {"type": "string"}}}}}],
        "stop": "one",
        "seed": 2**63,
        "logit_bias": {"7": -1.5},
        "temperature": None,
        "logprobs": True,
    }
    frame = _enforce_schema(dict(request), schema)
    assert len(frame) == 1
    row = {name: value for name, value in frame.iloc[0].to_dict().items() if name != signature.ROW_MARKER}
    assert set(request) <= set(row)
    assert all(row[name] == value and type(row[name]) is type(value) for name, value in request.items())
    small = _enforce_schema({"messages": [{"role": "user", "content": "a"}], "stop": ["x", "y"]}, schema)
    assert len(small) == 1
    assert small.iloc[0]["stop"] == ["x", "y"]


def test_signature_takes_frames():
    """A DataFrame keeps one row a request; columns that are missing are not asked for."""
    schema = signature.lossless_signature().inputs
    frame = pd.DataFrame({"prompt": ["a", "b"], "max_tokens": [1, 2]})
    kept = _enforce_schema(frame, schema)
    assert kept["prompt"].tolist() == ["a", "b"]
    assert kept["max_tokens"].tolist() == [1, 2]


def test_signature_is_always_there(tmp_path, llama_dir):
    """Unity Catalog demands a signature: there is one without asking, and a caller's own stands."""
    llm.save_model(tmp_path / "m", llama_dir)
    saved = Model.load(str(tmp_path / "m")).signature
    assert set(FIELDS["embeddings"]) <= set(saved.inputs.input_names())
    assert saved.inputs.required_input_names() == []
    assert saved.outputs.input_names()[:3] == ["id", "object", "created"]
    own = ModelSignature(inputs=Schema([ColSpec(DataType.string, "prompt")]))
    llm.save_model(tmp_path / "n", llama_dir, signature=own)
    assert Model.load(str(tmp_path / "n")).signature == own


def test_every_setting_is_saved(tmp_path, llama_dir):
    """model_config holds every engine setting, so that each may be overridden; those given have their value."""
    llm.save_model(
        tmp_path / "m",
        llama_dir,
        dtype="bfloat16",
        model_config={"max_num_seqs": 8},
        defaults={"max_tokens": 32},
    )
    saved = Model.load(str(tmp_path / "m")).flavors["python_function"]["config"]
    assert set(saved) == {
        *EngineSettings.__struct_fields__,
        "default_adapter",
        "output",
        "defaults",
        "generation_config",
    }
    assert (saved["dtype"], saved["max_num_seqs"], saved["idle_timeout"]) == ("bfloat16", 8, 3.0)
    config = model_config.parse(saved, {"max_num_seqs": 2, "default_adapter": "x"})
    assert config.settings == EngineSettings(dtype="bfloat16", max_num_seqs=2)
    assert (config.defaults, config.default_adapter) == ({"max_tokens": 32}, "x")


def test_settings_from_a_file(tmp_path):
    """``model_config`` may be the path of a YAML file."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"threads": 2}))
    assert model_config.parse(tmp_path / "c.yaml").settings.threads == 2
    assert model_config.parse(str(tmp_path / "c.yaml")).settings.threads == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"model_config": {"dtipe": "float32"}},
            "model_config: 'dtipe' is not a setting; did you mean 'dtype'? expected one of dtype, ",
        ),
        ({"max_seqs": 3}, "model_config: 'max_seqs' is not a setting"),
        ({"dtype": "fp8"}, "dtype: 'fp8' is not allowed; expected one of 'auto', "),
        ({"max_num_seqs": "many"}, "max_num_seqs: 'many' is not allowed; expected an integer from 1"),
        ({"defaults": {"messages": []}}, "defaults: 'messages' cannot have a default"),
        ({"defaults": {"temprature": 1}}, "defaults: 'temprature' cannot have a default"),
        ({"defaults": [1]}, "defaults: [1] is not allowed"),
        ({"default_adapter": 3}, "default_adapter: 3 is not allowed"),
        ({"model_config": 3}, "model_config: 3 is not allowed"),
        ({"model_config": "nowhere.yaml"}, "No such file"),
    ],
)
def test_settings_that_are_refused(tmp_path, llama_dir, options, reason):
    """An unknown setting or a wrong value is refused by name when the model is saved."""
    with pytest.raises(MlflowException) as caught:
        llm.save_model(tmp_path / "m", llama_dir, **options)
    assert reason in caught.value.message


def test_requirements_are_exact(tmp_path, llama_dir):
    """Every line is an exact public version that is installed now, and the project comes from the wheel beside them."""
    llm.save_model(tmp_path / "m", llama_dir)
    lines = (tmp_path / "m/requirements.txt").read_text().splitlines()
    assert re.fullmatch(r"--find-links wheels/[0-9a-f]{12}", lines[0])
    pins = {r.name: str(r.specifier) for r in map(Requirement, lines[1:])}
    assert all(spec.startswith("==") and "+" not in spec for spec in pins.values())
    assert pins["torch"] == "==" + version("torch").split("+")[0]
    assert pins["transformers"] == "==" + version("transformers")
    assert {"mlflow", "peft", "safetensors", "mlflow-llm"} <= pins.keys()
    conda = yaml.safe_load((tmp_path / "m/conda.yaml").read_text())
    assert conda["dependencies"][-1]["pip"] == lines
    python = yaml.safe_load((tmp_path / "m/python_env.yaml").read_text())
    assert python["dependencies"] == ["-r requirements.txt"]


def test_requirements_of_the_caller(tmp_path, llama_dir):
    """Extra requirements are added and a list replaces ours; the project's wheel stays unless the list names it."""
    llm.save_model(tmp_path / "a", llama_dir, extra_pip_requirements=["einops==0.8.1"])
    extra = (tmp_path / "a/requirements.txt").read_text()
    assert "einops==0.8.1" in extra
    assert "torch==" in extra
    llm.save_model(tmp_path / "b", llama_dir, pip_requirements=["mlflow", "torch"])
    lines = (tmp_path / "b/requirements.txt").read_text().splitlines()
    assert lines[1:] == ["mlflow", "torch", f"mlflow-llm=={version('mlflow-llm')}"]
    llm.save_model(tmp_path / "c", llama_dir, pip_requirements=["mlflow", "mlflow-llm>=0.1"])
    assert not (tmp_path / "c/wheels").exists()
    with pytest.raises(MlflowException, match="Only one of"):
        llm.save_model(tmp_path / "d", llama_dir, pip_requirements=["a"], extra_pip_requirements=["b"])


def test_wheel_installs_and_is_the_package(tmp_path, llama_dir):
    """The wheel carries the whole package; pip takes it, and its record and entry points are right."""
    llm.save_model(tmp_path / "m", llama_dir)
    (wheel,) = (tmp_path / "m/wheels").rglob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    modules = {f"mlflow_llm/{name}/__init__.py" for name in ("flavors/llm/save", "serving/cli")}
    assert {*modules, "mlflow_llm/py.typed"} <= set(names)
    assert not any("__pycache__" in name or name.startswith(("tests", "flavors")) for name in names)
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True, text=True)
    assert (target / "mlflow_llm/flavors/llm/save/__init__.py").is_file()
    assert "mlflow-llm = mlflow_llm" in next(target.glob("*.dist-info/entry_points.txt")).read_text()


def test_wheel_is_the_same_every_time(tmp_path, llama_dir):
    """Equal content gives an equal wheel in a folder of equal name, so environments are shared."""
    wheels = []
    for name in ("a", "b"):
        own_wheel.built_wheel.cache_clear()
        llm.save_model(tmp_path / name, llama_dir)
        (wheel,) = (tmp_path / name / "wheels").rglob("*.whl")
        wheels.append((wheel.parent.name, wheel.read_bytes()))
    assert wheels[0] == wheels[1]


def test_wheel_follows_the_package(tmp_path, monkeypatch):
    """The wheel is built once per process, and again when a file of the package has changed."""
    (tmp_path / "a.py").write_text("VALUE = 1\n")
    monkeypatch.setattr(own_wheel, "package_paths", lambda: iter([("mlflow_llm/a.py", tmp_path / "a.py")]))
    first = own_wheel.write_wheel(tmp_path)
    assert own_wheel.write_wheel(tmp_path) == first
    (tmp_path / "a.py").write_text("VALUE = 10\n")
    assert own_wheel.write_wheel(tmp_path) != first


def test_code_paths(tmp_path, llama_dir):
    """Files of the caller are carried in the model under code/."""
    (tmp_path / "extra.py").write_text("VALUE = 1\n")
    llm.save_model(tmp_path / "m", llama_dir, code_paths=[str(tmp_path / "extra.py")])
    assert (tmp_path / "m/code/extra.py").is_file()
    assert Model.load(str(tmp_path / "m")).flavors["llm"]["code"] == "code"
    assert llm.load_bundle(Path(tmp_path / "m")).tasks == ("chat", "completions")


def test_metadata_is_a_dict(tmp_path, store, llama_dir):
    """Metadata other than a dict is refused by name when saving and logging, and nothing is left."""
    with pytest.raises(PackagingError, match="metadata: 'x' is not allowed; expected a dict"):
        llm.save_model(tmp_path / "m", llama_dir, metadata="x")
    assert not (tmp_path / "m").exists()
    with pytest.raises(PackagingError, match="metadata: 'x' is not allowed; expected a dict"):
        llm.log_model(llama_dir, name="m", metadata="x")


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\xff", "can't decode"), (b"{", "line 1"), (b"[" * 2000, "")],
    ids=["bytes", "half", "deep"],
)
def test_an_invalid_settings_file_is_refused(tmp_path, llama_dir, content, why):
    """A settings file that is not YAML is refused by its name."""
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    with pytest.raises(PackagingError, match=f"model_config: .* cannot be read: .*{why}"):  # a long path is cut
        llm.save_model(tmp_path / "m", llama_dir, model_config=str(file))
    with pytest.raises(PackagingError, match=r"model_config: .* cannot be read"):
        llm.save_model(tmp_path / "m", llama_dir, model_config=str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("load", [llm.load_model, llm.load_bundle, llm.as_responses_agent])
@pytest.mark.parametrize("uri", [None, 5, ""])
def test_an_invalid_model_uri_is_refused(load, uri):
    """A model URI that names nothing is refused by its value; an empty one is not the current directory."""
    with pytest.raises(PackagingError, match=f"model_uri: {uri!r} is not allowed; expected a local directory"):
        load(uri)


def test_a_file_of_a_model_is_refused(tmp_path, llama_dir):
    """A file of a model is refused, and so is a directory without the file of the model's settings."""
    llm.save_model(tmp_path / "m", llama_dir, max_num_seqs=2)
    with pytest.raises(PackagingError, match="is a file; expected a model's directory"):
        llm.load_model(str(tmp_path / "m" / "MLmodel"))
    with pytest.raises(PackagingError, match=r"manifest\.json is missing in .*MLmodel"):
        llm.load_model((tmp_path / "m" / "MLmodel").as_uri())
    (tmp_path / "m" / "MLmodel").unlink()
    with pytest.raises(PackagingError, match="MLmodel is missing"):
        llm.load_model(str(tmp_path / "m"))


def test_default_adapter_may_be_overridden(tmp_path, llama_dir, adapter_dir):
    """A load may replace the saved default adapter by another of the model, or by none."""
    adapters = {"formal": adapter_dir, "casual": adapter_dir}
    llm.save_model(tmp_path / "m", llama_dir, adapters=adapters, default_adapter="formal")
    configured = bundle_reader.configured
    assert configured(tmp_path / "m", None)[0].default_adapter == "formal"
    assert configured(tmp_path / "m", {"default_adapter": "casual"})[0].default_adapter == "casual"
    assert configured(tmp_path / "m", {"default_adapter": None})[0].default_adapter is None
    with pytest.raises(PackagingError, match="default_adapter: 'x' is not an adapter; expected casual, formal"):
        configured(tmp_path / "m", {"default_adapter": "x"})


def test_pinned_adapters_are_the_models(tmp_path, llama_dir, adapter_dir):
    """A pinned adapter that the model does not have is refused when logging and when a load overrides the setting."""
    adapters = {"formal": adapter_dir}
    with pytest.raises(PackagingError, match="pinned_adapters: 'x' is not an adapter of the model; it has formal"):
        llm.save_model(tmp_path / "no", llama_dir, adapters=adapters, pinned_adapters=["x"])
    llm.save_model(tmp_path / "m", llama_dir, adapters=adapters, pinned_adapters=["formal"])
    configured = bundle_reader.configured
    assert configured(tmp_path / "m", None)[1].settings.pinned_adapters == ("formal",)
    with pytest.raises(PackagingError, match="pinned_adapters: 'x' is not an adapter; expected formal"):
        configured(tmp_path / "m", {"pinned_adapters": ["x"]})
