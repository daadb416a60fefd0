"""The run that trained an adapter, where nobody names it: by Trainer's output directory, or the run that logs it."""

from __future__ import annotations

import os
import shutil
import time

import mlflow
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from flavor_models import add_lora, byte_tokenizer, tiny_llama
from mlflow import MlflowClient
from transformers import Trainer, TrainingArguments

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli import cli


def run_of(info, name: str = "formal") -> str | None:
    """Return the run that is recorded for an adapter of a logged model."""
    return mlflow.get_logged_model(info.model_id).params.get(f"llm.adapter.{name}.run_id")


def train(output_dir) -> None:
    """Train a LoRA of the tiny Llama for two steps by transformers' Trainer, which logs to the active run."""
    rows = [{"input_ids": torch.arange(40, 50), "labels": torch.arange(40, 50)}] * 2
    arguments = TrainingArguments(
        output_dir=output_dir,
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=1,
        report_to="mlflow",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    Trainer(model=add_lora(tiny_llama()), args=arguments, train_dataset=rows).train()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_directory_of_trainer_knows_its_run(store, llama_dir, tmp_path, monkeypatch):
    """A checkpoint that Trainer wrote in a run is of that run, also when it is logged later, without one; its dataset
    is recorded too. A run that began after the weights were written is not taken."""
    monkeypatch.chdir(tmp_path)
    with mlflow.start_run() as run:
        mlflow.log_input(mlflow.data.from_pandas(pd.DataFrame({"text": ["a"]}), name="letters"), context="training")
        train("./out")
    with mlflow.start_run():
        mlflow.log_param("output_dir", "./out")
    later = time.time() - 3600
    info = llm.log_model(llama_dir, name="m", adapters={"formal": "out/checkpoint-2"})
    assert run_of(info) == run.info.run_id
    assert mlflow.get_logged_model(info.model_id).params["llm.adapter.formal.datasets"].startswith("letters@")
    weights = tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors"
    os.utime(weights, (later, later))
    assert run_of(llm.log_model(llama_dir, name="m", adapters={"formal": tmp_path / "out" / "checkpoint-2"})) is None


def test_the_run_that_logs_has_trained(store, llama_dir, adapter_dir, tmp_path):
    """A PeftModel, and a directory that was written in the run, are of the run that logs them, if it has metrics; an
    older directory, and what a run without any logs, are of none."""
    with mlflow.start_run() as run:
        assert run_of(llm.log_model(add_lora(tiny_llama(), "formal"), name="m", tokenizer=byte_tokenizer())) is None
        mlflow.log_metric("loss", 0.5)
        info = llm.log_model(add_lora(tiny_llama(), "formal"), name="m", tokenizer=byte_tokenizer())
        assert run_of(info) == run.info.run_id
        assert run_of(llm.log_model(llama_dir, name="m", adapters={"formal": adapter_dir})) is None
        shutil.copytree(adapter_dir, tmp_path / "new", copy_function=shutil.copyfile)
        assert run_of(llm.log_model(llama_dir, name="m", adapters={"formal": tmp_path / "new"})) == run.info.run_id
        named = llm.log_model(
            llama_dir, name="m", adapters={"formal": tmp_path / "new"}, adapter_runs={"formal": run.info.run_id}
        )
    assert run_of(named) == run.info.run_id
    assert run_of(llm.log_model(llama_dir, name="m", adapters={"formal": tmp_path / "new"})) is None


def test_lineage_is_shown(store, llama_dir, adapter_dir):
    """The base's hash is that of all models over one base; notebook and command line show each adapter's run."""
    with mlflow.start_run() as run:
        mlflow.log_artifacts(str(adapter_dir), "adapter")
    source = f"runs:/{run.info.run_id}/adapter"
    llm.log_model(llama_dir, name="m", registered_model_name="base")
    llm.log_model(llama_dir, name="m", registered_model_name="whole", adapters={"formal": source})
    llm.log_model(name="m", base="models:/base/1", adapters={"formal": source}, registered_model_name="alone")
    tags = [MlflowClient().get_model_version(name, "1").tags["llm.base_hash"] for name in ("base", "whole", "alone")]
    assert len(set(tags)) == 1
    for name in ("whole", "alone"):
        with llm.closing(llm.load_model(f"models:/{name}/1", in_process=True)) as model:
            shown = model._repr_html_()
        assert "Adapter formal</th>" in shown
        base = "models:/base/1" if name == "alone" else "tiny-llama"
        assert f"LORA, rank 4, trained on {base}, by run {run.info.run_id}" in shown
        done = CliRunner().invoke(cli, ["models", "show", f"{name}/1"])
        assert f"base_hash: {tags[0]}\n" in done.stdout, done.output
        assert f"adapter.formal.run_id: {run.info.run_id}\n" in done.stdout
    missing = CliRunner().invoke(cli, ["models", "show", "models:/nothing/1"])
    assert missing.exit_code == 1
    assert missing.output.startswith("Error: models:/nothing/1: ")
