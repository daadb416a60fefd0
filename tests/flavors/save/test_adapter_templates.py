"""The chat template and the tokenizer beside an adapter, as TRL and transformers' ``Trainer`` leave them there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlflow
import pytest
from flavor_models import byte_tokenizer, tiny_llama
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle
from mlflow_llm.serving.interface.engine import Capabilities, EngineInfo
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Message, RawChat
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView
from mlflow_llm.serving.tasks.prompt.text import TextModel

BASE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture
def trained(adapter_dir, tmp_path):
    """Return ``trained(template, tokenizer=…)``: an adapter's directory with these beside it."""

    def make(template=OWN, tokenizer=None):
        folder = tmp_path / "trained"
        shutil.copytree(adapter_dir, folder)
        tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return folder

    return make


def _served(root):
    return TextModel(read_bundle(root))


def _prompt(text, adapter, **fields):
    info = EngineInfo(
        content_hash="0" * 64, tasks=("chat", "completions"), vocab_size=text.vocab_size, max_model_len=512,
        max_num_seqs=1, max_kv_tokens=512, capabilities=Capabilities(),
    )  # fmt: skip
    view = EndpointView(name="m", info=info, text=text, adapters=("formal",))
    raw = RawChat(messages=(Message(role="user", content="hi"),), adapter=adapter, **fields)
    return text.decode(prepare(raw, view).sequences[0].prompt_token_ids, skip_special_tokens=False)


def test_requests_of_an_adapter_use_its_template(trained, tmp_path):
    """They have the prompt that it was trained with; the base's requests have the base's."""
    llm.save_model(
        tmp_path / "m", tiny_llama(), tokenizer=byte_tokenizer(chat_template=BASE), adapters={"formal": trained()}
    )
    text = _served(tmp_path / "m")
    assert _prompt(text, "formal") == "<user>hi\n<assistant>"
    assert _prompt(text, None) == "[user]hi\n[assistant]"
    assert _prompt(text, "formal", chat_template="default") == "[user]hi\n[assistant]"


def test_a_template_of_the_whole_model_is_for_its_adapters_too(trained, tmp_path, caplog):
    """A template that the caller passes replaces the adapter's, and a warning says so."""
    llm.save_model(
        tmp_path / "m", tiny_llama(), tokenizer=byte_tokenizer(), chat_template=BASE, adapters={"formal": trained()}
    )
    assert _prompt(_served(tmp_path / "m"), "formal") == "[user]hi\n[assistant]"
    assert "'formal' has a chat template of its own, which chat_template= replaces" in caplog.text


def test_an_adapter_that_chats_over_a_base_that_does_not(trained, tmp_path):
    """A base without a template has chats by its adapter, and refuses its own by name."""
    llm.save_model(tmp_path / "m", tiny_llama(), tokenizer=byte_tokenizer(), adapters={"formal": trained()})
    text = _served(tmp_path / "m")
    assert _prompt(text, "formal") == "<user>hi\n<assistant>"
    with pytest.raises(InvalidField, match="this model has no chat template"):
        _prompt(text, None)


def test_the_same_template_is_not_kept_twice(trained, tmp_path):
    """An adapter with the template of its base has none of its own."""
    llm.save_model(
        tmp_path / "m", tiny_llama(), tokenizer=byte_tokenizer(chat_template=BASE), adapters={"formal": trained(BASE)}
    )
    assert sorted(_served(tmp_path / "m").templates) == ["default"]


def test_a_tokenizer_with_other_tokens_is_refused(trained, tmp_path):
    """It would read other texts than the adapter was trained on; the token is named."""
    other = byte_tokenizer()
    other.add_tokens(["<|im_start|>"])
    reason = r"adapters: 'formal': its tokenizer differs from the model's: '<\|im_start\|>' is token \d+ there and no"
    with pytest.raises(MlflowException, match=reason):
        llm.save_model(
            tmp_path / "m", tiny_llama(), tokenizer=byte_tokenizer(), adapters={"formal": trained(BASE, other)}
        )


def test_another_end_of_text_is_named(trained, tmp_path, caplog):
    """An adapter that ends its texts otherwise would not end; a warning says what to do."""
    other = byte_tokenizer()
    other.eos_token = "a"
    llm.save_model(tmp_path / "m", tiny_llama(), tokenizer=byte_tokenizer(), adapters={"formal": trained(BASE, other)})
    assert "'formal' ends a text with 'a', the model with" in caplog.text


def test_a_template_without_a_tokenizer(adapter_dir, tmp_path):
    """The template's file alone is enough, and so is the older place for it."""
    files = {"chat_template.jinja": OWN, "tokenizer_config.json": json.dumps({"chat_template": OWN})}
    for number, (name, text) in enumerate(files.items()):
        folder = tmp_path / f"trained{number}"
        shutil.copytree(adapter_dir, folder)
        (folder / name).write_text(text)
        root = tmp_path / f"m{number}"
        llm.save_model(root, tiny_llama(), tokenizer=byte_tokenizer(chat_template=BASE), adapters={"formal": folder})
        assert _prompt(_served(root), "formal") == "<user>hi\n<assistant>"


def test_over_a_registered_base(trained, store, llama_dir):
    """An adapter that is logged alone has its own template too."""
    llm.log_model(llama_dir, name="b", registered_model_name="assistant", chat_template=BASE)
    info = llm.log_model(None, name="a", base="models:/assistant/1", adapters={"formal": trained()})
    text = _served(Path(mlflow.artifacts.download_artifacts(info.model_uri)))
    assert _prompt(text, "formal") == "<user>hi\n<assistant>"
    assert _prompt(text, None) == "[user]hi\n[assistant]"
