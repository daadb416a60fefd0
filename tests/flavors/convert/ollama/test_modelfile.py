"""Ollama's Modelfiles: their syntax, their parameters, and models that are logged from them."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
import transformers as tf
from flavor_models import TEMPLATE, add_lora, byte_tokenizer, tiny_llama
from gguf_files import SIZES, byte_level, random_model, write
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.convert.ollama.modelfile import Instruction, parse
from mlflow_llm.flavors.llm.convert.ollama.parameters import sort
from mlflow_llm.serving.interface.errors import PackagingError

pytest.importorskip("gguf")
GO = "{{ if .System }}<|system|>{{ .System }}\n{{ end }}<|user|>{{ .Prompt }}\n<|assistant|>"
GREEDY = "PARAMETER temperature 0\nPARAMETER num_predict 8\n"


def values(text: str) -> list[tuple[str, str, str]]:
    return [(one.name, one.key, one.value) for one in parse(text)]


def test_instructions_and_their_quotes() -> None:
    """Values end with their line unless they are in quotes; comments, case and Windows' line ends do not matter."""
    text = (
        '# a comment\r\nfrom ./a b.gguf\r\n\r\nSYSTEM """\nTwo\n# lines\n"""\n  Parameter  stop  "a\nb"\n'
        'TEMPLATE """{{ .Prompt }}"""\nMESSAGE user Hi "there"\nPARAMETER seed\t3\nLICENSE ""\n'
    )
    assert values(text) == [
        ("from", "", "./a b.gguf"),
        ("system", "", "\nTwo\n# lines\n"),
        ("parameter", "stop", "a\nb"),
        ("template", "", "{{ .Prompt }}"),
        ("message", "user", 'Hi "there"'),
        ("parameter", "seed", "3"),
        ("license", "", ""),
    ]


SYNTAX = {
    "unknown": ("FROM x\nCOPY a b", "line 2: 'COPY' is not an instruction; expected one of FROM, PARAMETER"),
    "not closed": ('FROM x\nSYSTEM """a\nb', "line 2: the quotes of SYSTEM are not closed"),
    "no value": ("FROM", "line 1: FROM has no value"),
    "no parameter": ("FROM x\nPARAMETER temperature", "line 2: PARAMETER has no value"),
    "a role": ("FROM x\nMESSAGE tool a", "line 2: MESSAGE 'tool': expected one of system, user, assistant"),
}


@pytest.mark.parametrize(("text", "message"), SYNTAX.values(), ids=SYNTAX)
def test_lines_that_are_none_are_refused(text: str, message: str) -> None:
    """A line that is no instruction is refused by its number."""
    with pytest.raises(PackagingError, match=message):
        values(text)


def parameter(key: str, value: str) -> Instruction:
    return Instruction(name="parameter", key=key, value=value, line=1)


def test_parameters_are_fields_settings_or_named() -> None:
    """Each parameter is a default of a field, a setting, or has a line that says why it has no effect."""
    given = {"temperature": "0.5", "top_k": "5", "num_predict": "-1", "num_ctx": "64", "mirostat": "2", "num_gpu": "9"}
    given |= {"repeat_penalty": "1.1", "repeat_last_n": "64"}
    pairs = [*given.items(), ("stop", "a"), ("stop", "b"), ("tfs_z", "1"), ("temperature", "0.25"), ("seed", "-1")]
    found = sort([parameter(key, value) for key, value in pairs])
    assert found.defaults == {"temperature": 0.25, "top_k": 5, "repetition_penalty": 1.1, "stop": ["a", "b"]}
    assert found.settings == {"max_model_len": 64}
    assert found.notes == [
        "PARAMETER mirostat 2 has no effect here: Mirostat is not supported, and Ollama has removed it",
        "PARAMETER num_gpu 9 has no effect here: all layers are on one device, which device= names",
        "PARAMETER repeat_last_n 64 has no effect here: repetition_penalty is counted over the whole text",
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("top_k", "many", "line 1: PARAMETER top_k: 'many' is not allowed; expected an integer"),
        ("temperature", "hot", "line 1: PARAMETER temperature: 'hot' is not allowed; expected a number"),
        ("tempature", "1", "line 1: PARAMETER 'tempature' is not one of Ollama's; expected one of temperature, top_k"),
    ],
)
def test_other_parameters_are_refused(key: str, value: str, message: str) -> None:
    """An unknown name, and a value of another type, are refused."""
    with pytest.raises(PackagingError, match=message):
        sort([parameter(key, value)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write a tiny GGUF file, a Hugging Face directory and an adapter of that."""
    root = tmp_path_factory.mktemp("ollama")

    def tokenizer(writer) -> None:
        byte_level(writer)
        writer.add_add_bos_token(True)

    write(root / "sha256-0123", random_model(tf.LlamaConfig(**SIZES)), tokenizer=tokenizer)
    tiny_llama().save_pretrained(root / "llama")
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(root / "llama")
    add_lora(tiny_llama()).save_pretrained(root / "pirate.lora")
    (root / "library").mkdir()
    return root


def logged(folder: Path, text: str, **arguments):
    (folder / "Modelfile").write_text(text)
    return llm.from_modelfile(folder / "Modelfile", name="m", **arguments)


def prompt_of(model, *messages) -> str:
    """Return the prompt of a conversation, as the model's own template and tokenizer make it."""
    bundle = llm.load_bundle(model.model_uri)
    tokenizer = tf.AutoTokenizer.from_pretrained(bundle.tokenizer_dir)
    template = Path(bundle.chat_templates["default"]).read_text()
    return tokenizer.apply_chat_template(
        list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
    )


USER = {"role": "user", "content": "Hi"}


def test_a_gguf_file_with_a_template(store, folder, caplog) -> None:
    """A GGUF file under any name is logged with template, system, examples, parameters and licence; the first token is
    the one that llama.cpp adds, and what has no effect is named."""
    text = f"""FROM ./sha256-0123
TEMPLATE \"\"\"{GO}\"\"\"
SYSTEM Be kind.
MESSAGE user 1+1?
MESSAGE assistant 2
LICENSE MIT License
REQUIRES 0.14.0
PARAMETER num_ctx 128
PARAMETER mirostat 1
{GREEDY}"""
    info = logged(folder, text, tags={"team": "a"}, defaults={"seed": 3})
    assert prompt_of(info, USER) == ("<s><|system|>Be kind.\n<|user|>1+1?\n<|assistant|>2<|user|>Hi\n<|assistant|>")
    flavor = info.flavors["llm"]
    assert flavor["request_defaults"] == {"temperature": 0.0, "max_tokens": 8, "seed": 3}
    assert flavor["facts"]["license"] == "mit"
    assert Model.load(info.model_uri).flavors["python_function"]["config"]["max_model_len"] == 128
    assert "PARAMETER mirostat 1 has no effect here" in caplog.text
    assert "REQUIRES 0.14.0 has no effect here: it is a version of Ollama" in caplog.text
    with llm.closing(mlflow.pyfunc.load_model(info.model_uri, model_config={"in_process": True})) as model:
        usage = model.predict({"messages": [USER], "ignore_eos": True})["usage"]
    assert usage["completion_tokens"] == 8


def test_a_directory_with_an_adapter(store, folder) -> None:
    """FROM a Hugging Face directory keeps its own template, into which SYSTEM goes, and ADAPTER answers by default."""
    info = logged(folder, f"FROM llama\nADAPTER ./pirate.lora\nSYSTEM Be kind.\n{GREEDY}")
    bundle = llm.load_bundle(info.model_uri)
    assert (sorted(bundle.adapters), bundle.default_adapter) == (["pirate-lora"], "pirate-lora")
    assert prompt_of(info, USER) == "<|system|>Be kind.\n<|user|>Hi\n<|assistant|>"
    assert (folder / "llama" / "model.safetensors").is_file()
    assert not (folder / "llama" / "LICENSE").exists()


def test_a_template_that_is_not_converted(store, folder) -> None:
    """A template without a conversion is refused with its line and what to do, and "model" takes the model's own."""
    text = "FROM llama\nTEMPLATE {{ len .Messages }}"
    with pytest.raises(MlflowException, match=r"line 2: TEMPLATE: line 1 of the template: .*or 'model' for the one"):
        logged(folder, text)
    assert prompt_of(logged(folder, text, chat_template="model"), USER) == "<|user|>Hi\n<|assistant|>"
    assert prompt_of(logged(folder, text, chat_template=TEMPLATE + "!"), USER).endswith("<|assistant|>!")


def test_a_model_without_a_template_completes(store, folder) -> None:
    """A GGUF file without a template, and no TEMPLATE, is a model of completions."""
    info = logged(folder, "FROM sha256-0123")
    assert info.flavors["llm"]["tasks"] == ["completions"]
    with pytest.raises(MlflowException, match="SYSTEM and MESSAGE need a chat template"):
        logged(folder, "FROM sha256-0123\nSYSTEM a")


def test_another_model_in_place_of_the_library(store, folder) -> None:
    """A name in Ollama's library is refused by its line; ``model=`` names the weights."""
    text = f"FROM llama3.2\n{GREEDY}"
    with pytest.raises(MlflowException, match=r"line 1: FROM llama3.2 is no file or directory here, and Ollama's"):
        logged(folder, text)
    info = logged(folder, text, model=folder / "llama")
    assert info.flavors["llm"]["tasks"] == ["chat", "completions"]
    with pytest.raises(MlflowException, match=r"model: .* is no file or directory here"):
        logged(folder, text, model="./nowhere")


REFUSED = {
    "no from": ("SYSTEM a", "Modelfile: it has no FROM"),
    "two": ("FROM llama\nFROM llama", "line 2: FROM is there twice"),
    "not a GGUF file": ("FROM Modelfile", "line 1: FROM 'Modelfile' is not a GGUF file"),
    "an adapter in GGUF": (
        "FROM llama\nADAPTER sha256-0123",
        "line 2: ADAPTER 'sha256-0123' is not allowed; expected a",
    ),
    "no adapter": ("FROM llama\nADAPTER gone", "line 2: ADAPTER 'gone' is no directory here"),
    "a value": ("FROM llama\nPARAMETER top_p 7", r"defaults.top_p: 7.0 is not allowed"),
    "a directory of nothing": ("FROM library", "FROM: 'library' holds neither a config.json nor one GGUF file"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_model_is_refused(store, folder, text: str, message: str) -> None:
    """Each line that cannot be honoured is refused by name."""
    with pytest.raises(MlflowException, match=message):
        logged(folder, text)


def test_a_file_that_is_none(store, tmp_path) -> None:
    """A Modelfile that is not there, or not text, is refused."""
    with pytest.raises(MlflowException, match="cannot be read as a Modelfile: FileNotFoundError"):
        llm.from_modelfile(tmp_path / "none", name="m")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MlflowException, match="cannot be read as a Modelfile: UnicodeDecodeError"):
        llm.from_modelfile(tmp_path / "binary", name="m")
