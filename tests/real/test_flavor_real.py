"""The flavor on real weights: SmolLM2-135M-Instruct, its GGUF form, and all-MiniLM-L6-v2."""

import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlflow_llm.flavors import llm

SCRIPT = """
import resource, sys
import mlflow.pyfunc, peft, torch, transformers
from mlflow_llm.flavors import llm
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
llm.save_model(sys.argv[2], sys.argv[1], link_files=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@torch.no_grad()
def last_logits(model, ids):
    return model(torch.tensor([ids])).logits[0, -1]


def test_directory(tmp_path, smollm2_dir):
    """SmolLM2 as a directory serves chat and completions, with weights byte for byte and full verification."""
    llm.save_model(tmp_path / "m", smollm2_dir, link_files=True)
    bundle = llm.load_bundle(tmp_path / "m", verify="full")
    assert bundle.tasks == ("chat", "completions")
    stored = Path(bundle.model_dir, "model.safetensors")
    assert stored.stat().st_size == Path(smollm2_dir, "model.safetensors").stat().st_size
    tokenizer = AutoTokenizer.from_pretrained(bundle.tokenizer_dir)
    text = Path(bundle.chat_templates["default"]).read_text()
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=text, tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in shown


def test_directory_is_not_loaded_to_memory(tmp_path, smollm2_dir):
    """Saving the directory raises the peak memory by far less than the size of the weights."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(smollm2_dir), str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    growth = int(done.stdout.split()[-1])
    assert growth < Path(smollm2_dir, "model.safetensors").stat().st_size / 2


def test_adapters_of_a_peft_model(tmp_path, smollm2_dir):
    """Two adapters on the real model come back with equal logits, and so does the base."""
    base = AutoModelForCausalLM.from_pretrained(smollm2_dir).eval()
    ids = AutoTokenizer.from_pretrained(smollm2_dir)("The capital of France is").input_ids
    expected = {"base": last_logits(base, ids)}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="formal")
    model.add_adapter("casual", LoraConfig(r=8, target_modules=["gate_proj", "down_proj"]))
    torch.manual_seed(0)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.05)
    model.eval()
    for name in ("formal", "casual"):
        model.set_adapter(name)
        expected[name] = last_logits(model, ids)
    llm.save_model(tmp_path / "m", model, tokenizer=smollm2_dir)
    bundle = llm.load_bundle(tmp_path / "m")
    reloaded = AutoModelForCausalLM.from_pretrained(bundle.model_dir).eval()
    assert torch.equal(last_logits(reloaded, ids), expected["base"])
    wrapped = PeftModel.from_pretrained(reloaded, bundle.adapters["formal"], adapter_name="formal").eval()
    wrapped.load_adapter(bundle.adapters["casual"], adapter_name="casual")
    for name in ("formal", "casual"):
        wrapped.set_adapter(name)
        assert torch.equal(last_logits(wrapped, ids), expected[name])
        assert not torch.equal(expected[name], expected["base"])


def test_gguf(tmp_path, smollm2_gguf):
    """A GGUF file becomes float32 safetensors with its own tokenizer and template, and answers sensibly."""
    llm.save_model(tmp_path / "m", smollm2_gguf)
    bundle = llm.load_bundle(tmp_path / "m")
    assert bundle.tasks == ("chat", "completions")
    model = AutoModelForCausalLM.from_pretrained(bundle.model_dir).eval()
    assert model.dtype == torch.float32
    assert getattr(model.config, "quantization_config", None) is None
    tokenizer = AutoTokenizer.from_pretrained(bundle.tokenizer_dir)
    ids = tokenizer("The capital of France is").input_ids
    assert tokenizer.decode(last_logits(model, ids).argmax()) == " Paris"


def test_sentence_transformers_directory(tmp_path, minilm_dir):
    """MiniLM is an embedding model with the pooling, normalisation and length of its files."""
    llm.save_model(tmp_path / "m", minilm_dir)
    bundle = llm.load_bundle(tmp_path / "m", verify="full")
    assert bundle.tasks == ("embeddings",)
    spec = bundle.embedding
    assert (spec.pooling, spec.normalize, spec.max_length) == ("mean", True, 256)
    assert Path(bundle.model_dir, "modules.json").is_file()
