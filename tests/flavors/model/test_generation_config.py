"""A model's ``generation_config.json`` as the defaults of its requests, and what overrides it."""

from __future__ import annotations

import json
import logging
import shutil

import mlflow
import pytest
from internals import session_of
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from transformers import GenerationConfig

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model import generation_config, model_config
from mlflow_llm.serving.interface.errors import PackagingError

QWEN = {
    "bos_token_id": 1,
    "eos_token_id": [257],
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 7,
    "transformers_version": "5.0.0",
    "num_beams": 4,
    "_from_model_config": True,
}
AS_FIELDS = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_tokens": 7,
}


@pytest.fixture(scope="module")
def qwen_dir(tmp_path_factory, llama_dir):
    """Save the tiny Llama with another generation config."""
    folder = tmp_path_factory.mktemp("qwen") / "tiny"
    shutil.copytree(llama_dir, folder)
    (folder / "generation_config.json").write_text(json.dumps(QWEN))
    return folder


@pytest.mark.parametrize(
    ("values", "defaults", "rest"),
    [
        (QWEN, AS_FIELDS, {"num_beams": 4}),
        ({"do_sample": False, "top_p": 0.9, "temperature": 0.7}, {"temperature": 0.0, "top_p": 0.9}, {}),
        ({"do_sample": True}, {}, {}),
        ({"temperature": 1.0, "top_k": 0}, {"temperature": 1.0, "top_k": 0}, {}),
        ({"temperature": 5.0, "repetition_penalty": "x"}, {}, {"temperature": 5.0, "repetition_penalty": "x"}),
        ({"stop_strings": ["###"], "min_new_tokens": 2}, {"stop": ["###"], "min_tokens": 2}, {}),
        (
            {"bad_words_ids": [[5, 6]], "no_repeat_ngram_size": 3},
            {"bad_words": [[5, 6]], "no_repeat_ngram_size": 3},
            {},
        ),
        ({"max_length": 4096, "num_beams": 1, "length_penalty": 1.0}, {}, {"max_length": 4096}),
        ({"suppress_tokens": [1], "bad_words_ids": None, "temperature": None}, {}, {"suppress_tokens": [1]}),
    ],
    ids=range(9),
)
def test_settings_read_from_the_file(tmp_path, values, defaults, rest):
    """Sampling settings become request fields and ``do_sample: false`` greedy; other active settings are reported."""
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert generation_config.read(tmp_path) == (defaults, rest)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_an_invalid_file_is_refused(tmp_path, text):
    """An invalid file is refused by name; a missing one gives no defaults."""
    assert generation_config.read(tmp_path) == ({}, {})
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(PackagingError, match=r"generation_config\.json"):
        generation_config.read(tmp_path)


def test_packaged_and_shown(tmp_path, qwen_dir, caplog):
    """The defaults are in model_config and in the flavor; a setting without effect is reported and kept in the file."""
    with caplog.at_level(logging.WARNING):
        llm.save_model(tmp_path / "m", qwen_dir, defaults={"max_tokens": 9, "top_k": None})
    assert "without effect here: num_beams=4" in caplog.text
    flavors = Model.load(str(tmp_path / "m")).flavors
    assert flavors["python_function"]["config"]["generation_config"] == AS_FIELDS
    expected = {name: value for name, value in AS_FIELDS.items() if name != "top_k"} | {"max_tokens": 9}
    assert flavors["llm"]["request_defaults"] == expected
    assert flavors["llm"]["generation_config_without_effect"] == {"num_beams": 4}
    assert json.loads((tmp_path / "m/model/generation_config.json").read_text()) == QWEN


def test_a_value_in_the_file_that_is_refused(tmp_path, llama_dir, caplog):
    """An invalid value is kept in the file, and the warning says what is allowed."""
    folder = tmp_path / "source"
    shutil.copytree(llama_dir, folder)
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4, "max_new_tokens": -1}))
    llm.save_model(tmp_path / "m", folder)
    assert "here: num_beams=4; max_new_tokens: -1 is not allowed; expected an integer" in caplog.text
    flavor = Model.load(str(tmp_path / "m")).flavors["llm"]
    assert flavor["request_defaults"] == {}
    assert flavor["generation_config_without_effect"] == {"num_beams": 4, "max_new_tokens": -1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.1, "max_new_tokens": 3}, {"temperature": 0.1, "max_tokens": 3}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({}, {}),
        (GenerationConfig(do_sample=False, repetition_penalty=1.5), {"repetition_penalty": 1.5, "temperature": 0.0}),
    ],
    ids=range(4),
)
def test_another_at_log_time(tmp_path, qwen_dir, given, expected):
    """A config given when logging replaces the file's: a dict by either kind of names, none, or transformers'
    object."""
    llm.save_model(tmp_path / "m", qwen_dir, generation_config=given)
    assert Model.load(str(tmp_path / "m")).flavors["llm"]["request_defaults"] == expected


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"num_beams": 4}, "generation_config: num_beams: 4 has no effect here; expected one of temperature"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": 9}, r"generation_config: temperature: 9 is not allowed; expected a number"),
        ({"max_new_tokens": -1}, "generation_config: max_new_tokens: -1 is not allowed; expected an integer"),
        ({"bad_words_ids": [["x"]]}, r"generation_config: bad_words_ids\[0\].*: 'x' is not allowed; expected"),
        ([1], r"generation_config: \[1\]"),
    ],
)
def test_invalid_defaults_are_refused(given, reported):
    """Settings given as defaults that have no effect or an invalid value are refused by name."""
    with pytest.raises(PackagingError, match=reported):
        model_config.parse({"generation_config": given})


def test_overrides_at_load(tmp_path, qwen_dir):
    """``defaults`` override the model's defaults, null removes one, and a request overrides both."""
    llm.save_model(tmp_path / "m", qwen_dir)
    uri = str(tmp_path / "m")
    with llm.load_model(uri, in_process=True, defaults={"temperature": 0, "top_p": None}) as model:
        request = session_of(model).valid({"prompt": "x", "ignore_eos": True})
        own = session_of(model).valid({"prompt": "x", "top_k": -1, "temperature": 1.5, "max_tokens": 2})
        assert model.complete("x", ignore_eos=True).usage.completion_tokens == 7
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.0, 1.0, 20, 7)
    assert (own.sampling.temperature, own.sampling.top_k, own.sampling.max_tokens) == (1.5, 0, 2)
    plain = mlflow.pyfunc.load_model(uri, model_config={"generation_config": {}, "in_process": True})
    valid = session_of(plain.get_raw_model()).valid({"prompt": "x"})
    plain.get_raw_model().close()
    assert (valid.sampling.temperature, valid.sampling.top_k) == (1.0, 0)


def test_options_are_the_settings(tmp_path):
    """The typed keyword arguments equal the engine settings in name and type; a typo is reported with the nearest
    name."""
    import typing

    from mlflow_llm.flavors.llm.model.options import EngineOptions
    from mlflow_llm.serving.interface.settings import EngineSettings

    settings = typing.get_type_hints(EngineSettings)
    assert typing.get_type_hints(EngineOptions) == {name: settings[name] for name in EngineSettings.__struct_fields__}
    with pytest.raises(MlflowException, match="'dtipe' is not a setting; did you mean 'dtype'"):
        llm.save_model(tmp_path / "model", object(), dtipe="float32")
