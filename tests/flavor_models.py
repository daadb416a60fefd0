"""Tiny real models with random weights for the flavor's tests."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(**options) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per byte, then <s>, </s>, <pad>, [CLS], [SEP]: ids 0..260."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", **options
    )
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    return tokenizer


def tiny_llama(seed: int = 0, **options) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | options))).eval()


def add_lora(model, name: str = "default", *, seed: int = 1, **options):
    """Return ``model`` under a PeftModel with a LoRA whose B is not zero, so that it changes the output."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options
    wrapped = get_peft_model(model, LoraConfig(**given), adapter_name=name)
    randomise(wrapped, name, seed)
    return wrapped.eval()


def randomise(wrapped, name: str, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if f".{name}." in key and "lora_" in key:
                parameter.normal_(0, 0.3)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(torch.arange(40, 60)[None]).logits
