"""Code that comes with a model runs only where the command line says that it may."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from mlflow_llm.serving.control.mlflow_resolver import ResolvedModel
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField, PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.tasks.prompt.text import TextModel

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the path of a file that exists once the model's code has run."""
    return tmp_path / "ran"


def with_code(source: Path, target: Path, marker: Path, config: str, changes: dict[str, object]) -> str:
    """Return a copy of a model or tokenizer that includes code of its own."""
    shutil.copytree(source, target)
    (target / "own.py").write_text(CODE.format(marker=str(marker)))
    path = target / config
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(target)


def test_a_models_own_code_is_not_run(tiny_bundle: Bundle, tmp_path: Path, marker: Path) -> None:
    """A model whose classes are its own is refused, and its code is not run."""
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    changes = {"model_type": "own", "architectures": ["Model"], "auto_map": names}
    path = with_code(Path(tiny_bundle.model_dir), tmp_path / "model", marker, "config.json", changes)
    bundle = Bundle(content_hash="own", tasks=("completions",), model_dir=path, tokenizer_dir="")
    with pytest.raises((PackagingError, ValueError), match="trust_remote_code"):
        load_model(bundle, EngineSettings())
    assert not marker.exists()


def test_a_tokenizers_own_code_is_not_run(instant_bundle: Bundle, tmp_path: Path, marker: Path) -> None:
    """A tokenizer whose class is its own is refused or read without it, and its code is not run."""
    changes = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    path = with_code(Path(instant_bundle.tokenizer_dir), tmp_path / "tok", marker, "tokenizer_config.json", changes)
    bundle = Bundle(content_hash="own", tasks=("chat",), model_dir=instant_bundle.model_dir, tokenizer_dir=path)
    with contextlib.suppress(PackagingError, ValueError):
        TextModel(bundle)
    assert not marker.exists()
    TextModel(bundle, trust_remote_code=True)
    assert marker.exists()


def test_a_model_does_not_grant_itself_its_code(tiny_bundle: Bundle) -> None:
    """A model's own config cannot enable trust_remote_code on a server: only the server's settings decide."""
    model = ResolvedModel(bundle=tiny_bundle, config={"trust_remote_code": True})
    with pytest.raises(PackagingError, match="-C trust_remote_code=true"):
        model.settings({})
    assert model.settings({"trust_remote_code": True}).trust_remote_code
    assert not model.settings({"trust_remote_code": False}).trust_remote_code


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% set _ = messages.append(1) %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_cannot_escape_their_sandbox(instant_bundle: Bundle, tmp_path: Path, template: str) -> None:
    """A template that accesses Python's internals or a file is refused as a request that cannot be rendered."""
    path = tmp_path / "template.jinja"
    path.write_text(template)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(instant_bundle.tokenizer_dir)
    tokenizer.save_pretrained(tmp_path / "tok")
    bundle = Bundle(
        content_hash="template",
        tasks=("chat",),
        model_dir=instant_bundle.model_dir,
        tokenizer_dir=str(tmp_path / "tok"),
        chat_templates={"default": str(path)},
    )
    with pytest.raises(InvalidField, match="template"):
        TextModel(bundle).chat([{"role": "user", "content": "Hi"}])
