"""Chat templates: their sources, and the check that they render."""

import json
import shutil

import pytest
from flavor_models import TEMPLATE, byte_tokenizer, tiny_llama
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)
TOOLS_ONLY = "{{ tools[0].function.name }}" + TEMPLATE


def templates_of(root):
    found = {}
    for name, path in llm.load_bundle(root).chat_templates.items():
        with open(path, newline="") as file:
            found[name] = file.read()
    return found


@pytest.fixture
def save(tmp_path, llama_dir):
    def run(**options):
        llm.save_model(tmp_path / "m", llama_dir, **options)
        return templates_of(tmp_path / "m")

    return run


def test_from_the_tokenizer(save):
    """Without chat_template the tokenizer's own template is stored."""
    assert save() == {"default": TEMPLATE}


def test_as_text_and_as_path(save, tmp_path):
    """A string is the template, or the path of a file that holds it; line ends are kept."""
    text = TEMPLATE + "\r\n"
    (tmp_path / "t.jinja").write_bytes(text.encode())
    assert save(chat_template=text) == {"default": text}
    shutil.rmtree(tmp_path / "m")
    assert save(chat_template=tmp_path / "t.jinja") == {"default": text}
    shutil.rmtree(tmp_path / "m")
    assert save(chat_template=str(tmp_path / "t.jinja")) == {"default": text}


def test_by_name(save, tmp_path):
    """Several named templates are stored: the default and others, which may need tools."""
    (tmp_path / "tools.jinja").write_text(TOOLS_ONLY)
    given = {"default": TEMPLATE, "tool_use": tmp_path / "tools.jinja"}
    assert save(chat_template=given) == {"default": TEMPLATE, "tool_use": TOOLS_ONLY}
    assert (tmp_path / "m/chat_templates/tool_use.jinja").read_text() == TOOLS_ONLY


def test_named_templates_of_a_tokenizer(tmp_path):
    """A tokenizer with named templates keeps them all, as an object and as a directory in the old list form."""
    both = {"default": TEMPLATE, "tool_use": TOOLS_ONLY}
    tokenizer = byte_tokenizer(chat_template=both)
    llm.save_model(tmp_path / "a", tiny_llama(), tokenizer=tokenizer)
    assert templates_of(tmp_path / "a") == both
    folder = tmp_path / "tokens"
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": text} for name, text in both.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    llm.save_model(tmp_path / "b", tiny_llama(), tokenizer=folder)
    assert templates_of(tmp_path / "b") == both


def test_template_without_a_system_role(save):
    """A template that refuses a system message is fine if it renders a conversation without one."""
    assert save(chat_template=NO_SYSTEM) == {"default": NO_SYSTEM}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}", "line 1: Unexpected end of template"),
        ("{{ raise_exception('no') }}", "does not render a conversation: TemplateError: no"),
        ("{{ messages.nothing.there }}", "does not render a conversation: UndefinedError"),
        ("Hello{# nobody #}", "the user's message is not in the text"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("no-such-file.jinja", "cannot be read: FileNotFoundError"),
        ("hello", "neither a file nor a template"),
        ("", "is not allowed; expected a template or its path"),
        ({"other": TEMPLATE, "tool_use": TEMPLATE}, 'is named "default"'),
        ({"default": TEMPLATE, "../up": TEMPLATE}, "the name '../up' is not allowed"),
        ({"default": 7}, "7 is not allowed"),
        (7, "7 is not allowed"),
        (["a"], "the entry 'a' is not allowed; expected a list of"),
        ([{"x": 1}], "is not allowed; expected a list of"),
        ([{"name": "a", "template": TEMPLATE, "x": 1}], "is not allowed; expected a list of"),
        ([{"name": ["a"], "template": TEMPLATE}], "the name ['a'] is not allowed"),
    ],
)
def test_templates_that_are_refused(save, template, reason):
    """An invalid template, or one that does not render, is refused with the reason from the sandbox."""
    with pytest.raises(MlflowException) as caught:
        save(chat_template=template)
    assert reason in caught.value.message
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
    assert len(caught.value.message) < 300


def test_chat_needs_a_template(tmp_path):
    """The chat task without a template is refused, and says what to pass."""
    with pytest.raises(MlflowException, match=r"'chat' needs a chat template .* pass chat_template="):
        llm.save_model(tmp_path / "m", tiny_llama(), tokenizer=byte_tokenizer(), task="chat")


@pytest.mark.parametrize(
    ("template", "needed"),
    [
        ("You are {{ persona.upper() }}." + TEMPLATE, "chat_template_kwargs.persona"),
        ("{{ messages[-1].content if messages | length == 1 else raise_exception('no') }}", "one message of the user"),
        (TEMPLATE, None),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}", None),
    ],
    ids=["variable", "one turn", "nothing", "parts"],
)
def test_what_a_request_must_give_is_named(save, caplog, template, needed):
    """A template that needs more than messages is packaged, and what its requests must give is named when logged."""
    assert save(chat_template=template) == {"default": template}
    named = [record.getMessage() for record in caplog.records if "a request must give" in record.getMessage()]
    assert [needed in message for message in named] == ([] if needed is None else [True])
