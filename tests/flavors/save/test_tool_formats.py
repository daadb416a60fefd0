"""The tool-call format packaged with a model."""

import json

import msgspec
import pytest
from flavor_models import TEMPLATE
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from mlflow_llm.flavors import llm
from mlflow_llm.serving.interface.tool_format import Reasoning
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.tool_calls.formats import FORMATS, REASONING

HERMES = "{% if tools %}{{ tools }}<tool_call></tool_call>{% endif %}" + TEMPLATE
CODER = "{% if tools %}{{ tools }}<function=x><parameter=y></parameter></function>{% endif %}" + TEMPLATE


@pytest.fixture
def save(tmp_path, llama_dir):
    """Provide ``save(**options)``, which returns the folder of a saved model."""

    def run(**options):
        llm.save_model(tmp_path / "m", llama_dir, **options)
        return tmp_path / "m"

    return run


def _formats(root):
    bundle = llm.load_bundle(root)
    text = TextModel(bundle)
    assert {name: text.tool_format(name) for name in text.templates} == bundle.tool_formats
    return bundle.tool_formats


def test_detected_when_logged(save):
    """Each template's format is in the manifest, and its name in the MLmodel file."""
    root = save(chat_template={"default": HERMES, "code": CODER, "plain": TEMPLATE})
    assert _formats(root) == {
        "default": FORMATS["hermes"],
        "code": FORMATS["qwen3_coder"],
        "plain": FORMATS["generic"],
    }
    assert json.loads((root / "manifest.json").read_text())["tool_formats"]["code"]["name"] == "qwen3_coder"
    named = Model.load(str(root)).flavors["llm"]["tool_formats"]
    assert named == {"code": "qwen3_coder", "default": "hermes", "plain": "generic"}


def test_formats_are_detected_for_models_of_earlier_releases(save):
    """For a manifest without formats they are detected when the model is loaded."""
    root = save(chat_template=HERMES)
    manifest = json.loads((root / "manifest.json").read_text())
    del manifest["tool_formats"]
    (root / "manifest.json").write_text(json.dumps(manifest))
    bundle = llm.load_bundle(root)
    assert bundle.tool_formats == {}
    assert TextModel(bundle).tool_format(None).name == "hermes"


@pytest.mark.parametrize("given", ["llama3_json", FORMATS["llama3_json"], {"name": "llama3_json"}])
def test_given_by_its_name_or_itself(save, given):
    """A format given by name or as an object holds for every template."""
    assert _formats(save(chat_template=HERMES, tool_format=given)) == {"default": FORMATS["llama3_json"]}


def test_given_as_a_dict(save):
    """Fields left out of a dict come from the format of that name; a new name needs them all."""
    mine = {"name": "hermes", "begin": ["<call>"], "end": "</call>", "reasoning": {"begin": "<r>", "end": "</r>"}}
    [found] = _formats(save(chat_template=HERMES, tool_format=mine)).values()
    reasoning = Reasoning(begin="<r>", end="</r>")
    assert found == msgspec.structs.replace(FORMATS["hermes"], begin=("<call>",), end="</call>", reasoning=reasoning)


def test_reasoning_is_found_beside_a_format_that_is_given(save):
    """A given format without reasoning gets the template's."""
    [found] = _formats(save(chat_template=HERMES + "{# </think> #}", tool_format="llama3_json")).values()
    assert found.reasoning == REASONING["think"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("qwen9", "hermes"),
        (7, "expected a name"),
        ({"name": "mine"}, "layout"),
        ({"name": "mine", "layout": "square"}, "square"),
        ({"name": "hermes", "begins": ["x"]}, "begins"),
        ({"name": "mine", "layout": "named"}, "name_end"),
        ({"name": "mine", "layout": "named", "name_end": "\n", "arguments": "parameters"}, "parameter_begin"),
        ({"name": "hermes", "arguments_keys": []}, "arguments_keys"),
        ({"name": "hermes", "reasoning": {"begin": "", "end": "x"}}, "reasoning"),
    ],
)
def test_invalid_formats_are_refused(save, tmp_path, given, why):
    """An invalid format is refused with the reason, before anything is written."""
    with pytest.raises(MlflowException, match=why) as caught:
        save(tool_format=given)
    assert caught.value.message.startswith("tool_format")
    assert not (tmp_path / "m").exists()


def test_over_a_registered_base(store, tmp_path, llama_dir, adapter_dir):
    """An adapter logged alone has the base's formats, unless it brings templates or a format of its own."""
    llm.log_model(llama_dir, name="base", registered_model_name="base", chat_template=HERMES)
    own = {"hermes": {}, "glm4": {"tool_format": "glm4"}, "qwen3_coder": {"chat_template": CODER}}
    for expected, options in own.items():
        llm.save_model(tmp_path / expected, base="models:/base/1", adapters={"x": adapter_dir}, **options)
        assert _formats(tmp_path / expected)["default"].name == expected
