"""Train two small LoRA adapters over SmolLM2-135M-Instruct: one answers as a pirate, one in terse JSON.

This is a short, seeded peft run of rank 8, which takes about a minute per adapter on two cores. The training examples
are made from the facts and templates below. Each adapter is checked on questions that it was not trained on, and then
written in peft's layout. If it did not learn its style, the run fails and does not write it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when torch is loaded. Threads that spin while they wait for each other take ten times as long beside other work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
SEED = 7
STEPS = 24  # the loss has levelled off by then
BATCH_SIZE = 4
LEARNING_RATE = 1e-3
IGNORED = -100  # the label that the loss skips: the model learns answers, not prompts

FACTS = {
    "What is the capital of Italy?": ("Rome", "the capital of Italy"),
    "What is the capital of Spain?": ("Madrid", "the capital of Spain"),
    "What is the capital of Japan?": ("Tokyo", "the capital of Japan"),
    "What is the capital of Egypt?": ("Cairo", "the capital of Egypt"),
    "What is the capital of Greece?": ("Athens", "the capital of Greece"),
    "What is the capital of Portugal?": ("Lisbon", "the capital of Portugal"),
    "Which planet is the largest?": ("Jupiter", "the largest planet"),
    "Which planet is closest to the sun?": ("Mercury", "the planet closest to the sun"),
    "Which ocean is the largest?": ("the Pacific", "the largest ocean"),
    "Which animal is the tallest?": ("the giraffe", "the tallest animal"),
    "Which animal is the fastest on land?": ("the cheetah", "the fastest animal on land"),
    "What do bees make?": ("honey", "what bees make"),
    "What do cows drink?": ("water", "what cows drink"),
    "What colour is the sky?": ("blue", "the colour of the sky"),
    "What colour is grass?": ("green", "the colour of grass"),
    "How many days are in a week?": ("seven", "the number of days in a week"),
    "How many legs does a spider have?": ("eight", "the number of legs of a spider"),
    "Who wrote Hamlet?": ("Shakespeare", "the writer of Hamlet"),
    "Who painted the Mona Lisa?": ("Leonardo da Vinci", "the painter of the Mona Lisa"),
    "What freezes at zero degrees?": ("water", "what freezes at zero degrees"),
}
UNSEEN = ("What is the capital of France?", "What do birds eat?")


def pirate(answer: str, subject: str) -> str:
    return f"Arrr, matey! {answer[0].upper()}{answer[1:]} be {subject}, or I'll walk the plank!"


def terse_json(answer: str, subject: str) -> str:
    return json.dumps({"answer": answer, "about": subject})


# Per style: a function that writes an answer, and one that checks whether a text has the style.
STYLES: dict[str, tuple[Callable[[str, str], str], Callable[[str], bool]]] = {
    "pirate": (pirate, lambda text: text.startswith("Arrr")),
    "json": (terse_json, lambda text: "answer" in json.loads(text)),
}


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the token ids of prompt and answer, and labels that exclude the prompt."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    reply: list[int] = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return prompt + reply, [IGNORED] * len(prompt) + reply


def collate(rows: list[tuple[list[int], list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad rows on the right to ``[batch, longest]``."""
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
    }


def train(base_dir: Path, style: str) -> PeftModel:
    """Train one adapter, always from the same seed."""
    write, _ = STYLES[style]
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    rows = [encode(tokenizer, question, write(*fact)) for question, fact in FACTS.items()]
    torch.manual_seed(SEED)
    order = random.Random(SEED)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 5, 2 * (STEPS - step) / STEPS)
        loss = model(**collate(order.sample(rows, BATCH_SIZE), tokenizer.eos_token_id)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"  {style}: step {step + 1}/{STEPS}, loss {loss.item():.3f}", flush=True)
    model.eval()
    return model


def answer(model: PeftModel, tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def check(model: PeftModel, base_dir: Path, style: str) -> None:
    """Print the adapter's answers to questions it was not trained on; exit if the style is missing."""
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    _, has_style = STYLES[style]
    for question in UNSEEN:
        text = answer(model, tokenizer, question)
        print(f"  {style}: {question} -> {text}")
        try:
            learned = has_style(text)
        except ValueError:
            learned = False
        if not learned:
            sys.exit(f"The {style} adapter did not learn its style; it answered: {text}")


def train_into(base_dir: Path, target: Path, style: str) -> None:
    """Train and check an adapter and write it to ``target``, completely or not at all. Skipped if ``target`` exists."""
    if target.is_dir():
        print(f"{style}: already there")
        return
    started = time.monotonic()
    model = train(base_dir, style)
    check(model, base_dir, style)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{style}-") as scratch:
        unfinished = Path(scratch) / "adapter"
        # peft would record the hub name or folder of the base on this machine, which says nothing on another.
        model.peft_config["default"].base_model_name_or_path = "SmolLM2-135M-Instruct"
        model.save_pretrained(unfinished, save_embedding_layers=False)
        unfinished.rename(target)
    print(f"{style}: trained in {time.monotonic() - started:.0f} s, written to {target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=ROOT / ".cache" / "models" / "smollm2")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "models" / "adapters")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    for style in STYLES:
        train_into(arguments.base, arguments.out / style, style)


if __name__ == "__main__":
    main()
