"""Fixtures of the flavor's tests: saved tiny models, and an MLflow store in a temporary directory."""

from __future__ import annotations

import gc
import shutil
import uuid
from pathlib import Path

import mlflow
import pytest
import torch
from flavor_models import TEMPLATE, add_lora, byte_tokenizer, tiny_llama
from stores import empty_store, own_stores
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

UPSTREAM_WARNINGS = (
    # peft asks for it on every get_peft_model
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    # MLflow says it of its own types when mlflow.pyfunc is imported
    "ignore:.*Any type hint is inferred as AnyType:UserWarning",
)


def pytest_configure(config):
    for line in UPSTREAM_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory, tokenizer) -> Path:
    """Save a tiny Llama with tokenizer and chat template as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("llama") / "tiny-llama"
    tiny_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert_dir(tmp_path_factory, tokenizer) -> Path:
    """Save a plain encoder directory."""
    folder = tmp_path_factory.mktemp("bert") / "tiny-bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=272, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    BertModel(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter_dir(tmp_path_factory, llama_dir) -> Path:
    """Save a LoRA of the tiny Llama as peft writes it."""
    folder = tmp_path_factory.mktemp("adapter") / "formal"
    add_lora(tiny_llama()).save_pretrained(folder)
    return folder


@pytest.fixture
def store(tmp_path):
    """Provide a tracking and registry store of this test alone, in SQLite."""
    # MLflow caches stores by URI: use a unique name, because pytest reuses the names of removed folders
    with own_stores(empty_store(tmp_path, f"mlflow-{uuid.uuid4().hex}.db")):
        mlflow.create_experiment("tests", artifact_location=(tmp_path / "artifacts").as_uri())
        mlflow.set_experiment("tests")
        yield tmp_path
        while mlflow.active_run():
            mlflow.end_run()
    gc.collect()  # SQLite connections of the store are closed when they are collected


@pytest.fixture(scope="module")
def spark():
    """Return a session of Spark with two tasks at once."""
    sql = pytest.importorskip("pyspark.sql")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    session = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()
