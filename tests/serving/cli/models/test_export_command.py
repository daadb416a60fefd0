"""``mlflow-llm export``: the command, on a saved model."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from flavor_models import TEMPLATE, add_lora, byte_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli import cli

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model with two adapters."""
    root = tmp_path_factory.mktemp("exported")
    adapters = {}
    for name in ("formal", "pirate"):
        add_lora(tiny_llama(), seed=len(name)).save_pretrained(root / name)
        adapters[name] = root / name
    llm.save_model(root / "saved", tiny_llama(), byte_tokenizer(chat_template=TEMPLATE), adapters=adapters)
    return root / "saved"


def test_the_directory_is_written_and_named(saved: Path, tmp_path: Path) -> None:
    """The command prints where the model is; each --adapter is written, and the base loads."""
    done = CliRunner().invoke(cli, ["export", str(saved), str(tmp_path / "out"), "--adapter", "pirate"])
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'out'}\n"), done.output
    assert [one.name for one in (tmp_path / "out" / "adapters").iterdir()] == ["pirate"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() == tiny_llama().num_parameters()


def test_a_refusal_is_one_line(saved: Path, tmp_path: Path) -> None:
    """An adapter that there is not is refused in one line, with status 1."""
    done = CliRunner().invoke(cli, ["export", str(saved), str(tmp_path / "out"), "--merge", "none"])
    assert done.exit_code == 1
    assert done.output == "Error: merge: 'none' is not an adapter of the model; it has formal, pirate\n"
