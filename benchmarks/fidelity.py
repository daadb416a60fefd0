"""How near each quantisation is to float32: divergence and agreement along float32's own answers to short questions.

    python benchmarks/fidelity.py --model .cache/models/smollm2

float32 answers each question greedily with up to 64 tokens, token by token as an engine decodes. Each form then reads
the same tokens the same way. At every place of the answers: the Kullback-Leibler divergence of its probabilities from
float32's, and whether its most probable token is float32's. Up to the first place where it is not, its own greedy
answer would be float32's, so ``equal answers`` and ``tokens up to the first difference`` are those of free answers.
Forms that are made when a model is logged are made here first; ``calibrated`` ones by Python's documentation. ``Q8_0``
is llama.cpp's: weights and activations in groups of 32 with a scale in float16, here by torch, with keys and values in
float32. Speed is measured by ``decode.py``.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import say_kernels
from report import publish
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlflow_llm.flavors.llm.save.quantize import default_texts, tokenised
from mlflow_llm.serving.engine.assembly import EngineParts, assemble
from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.quantize.weight_writer import quantize_files
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

QUESTIONS = (
    "What is the capital of France?",
    "Describe the French flag and anthem in one sentence.",
    "Explain what a database index is.",
    "Write a short poem about rain.",
    "How do I boil an egg?",
    "What is 17 times 23?",
    "Name three planets.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Who wrote Hamlet?",
    "How do vaccines work?",
    "Translate 'good morning' into Spanish.",
    "What is the difference between TCP and UDP?",
    "Tell me a joke about cats.",
    "Summarise the water cycle.",
    "What is a prime number?",
    "Write a Python function that reverses a string.",
    "Which animals sleep in winter?",
    "What is the largest ocean?",
    "How does a bicycle stay upright?",
    "List the days of the week.",
    "What is machine learning?",
    "Who was Marie Curie?",
    "How many minutes are in a day?",
    "What should I pack for a week by the sea?",
    "Explain gravity to a child.",
    "What is the boiling point of water in Fahrenheit?",
    "Give two synonyms of 'quick'.",
    "Why do leaves change colour?",
    "How does a refrigerator work?",
    "Write a haiku about the sea.",
    "What is the tallest mountain?",
    "Explain recursion.",
    "List five fruits.",
    "Who painted the Mona Lisa?",
    "What is inflation?",
    "How do I tie a tie?",
    "What does a cell membrane do?",
    "Write a short email asking for a day off.",
    "What is 144 divided by 12?",
    "Name a famous physicist.",
    "How do plants make food?",
    "What is the speed of light?",
    "Give me tips for a job interview.",
    "What is the plot of Romeo and Juliet?",
    "How do I change a flat tyre?",
    "What is an operating system?",
    "Translate 'thank you' into German.",
    "What causes tides?",
    "Write a SQL query that counts users.",
    "What is democracy?",
    "Which planet is the largest?",
    "How long should I sleep?",
    "Why is exercise important?",
    "What are black holes?",
    "Describe a sunset.",
    "How do computers store numbers?",
    "What is the currency of Japan?",
    "Suggest a name for a dog.",
)
MAX_TOKENS = 64
PLAIN: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8, KV in float32": {"quantization": "int8", "kv_cache_dtype": "float32"},
}
LOGGED = {"int8, calibrated": ("int8", {}), "int8, calibrated, KV in float32": ("int8", {"kv_cache_dtype": "float32"})}
Q8_0 = "Q8_0 by torch"
Q8_0_GROUP = 32
LOGGED |= {"int4": ("int4", {}), "int4, KV in float32": ("int4", {"kv_cache_dtype": "float32"})}


class Model:
    """A model whose logits are asked token by token, in one sequence at a time."""

    def __init__(self, folder: str, **settings: Any) -> None:
        bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=folder, tokenizer_dir=folder)
        parts = assemble(bundle, EngineSettings(packed_cache=0, kv_cache_memory=1 << 28, **settings))
        assert isinstance(parts, EngineParts)
        self._forward, self._cache = parts.runner.step_forward, parts.cache

    def begin(self, prompt: Sequence[int]) -> Any:
        """Return the log probabilities [V] after a prompt."""
        tokens = np.array(prompt, dtype=np.int32)
        self._cache.acquire(0, PrefixKey("", ""), tokens, at_most=0)
        return self._step(tokens, 0)

    def follow(self, token: int, place: int) -> Any:
        """Return the log probabilities [V] after one more token, the one at ``place``."""
        assert self._cache.grow(0, place + 1)
        return self._step(np.array([token]), place)

    def end(self) -> None:
        self._cache.release(0, keep=False)

    def _step(self, tokens: Any, start: int) -> Any:
        count = len(tokens)
        step = StepInput(tokens.astype(np.int64), [Row(0, start, count)], [None], [count - 1])
        return self._forward.forward(step)[0].float().log_softmax(-1)


class InGroups(torch.nn.Linear):
    """A linear whose weights and activations are rounded as in llama.cpp's Q8_0."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self.weight, self.bias = torch.nn.Parameter(in_groups(plain.weight), requires_grad=False), plain.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(in_groups(x), self.weight, self.bias)


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded to int8 in groups, each with a scale in float16."""
    groups = x.unflatten(-1, (-1, Q8_0_GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale.clamp_min(1e-30)).round() * scale.half().float()).flatten(-2)


class ModelByTorch:
    """A model of transformers in Q8_0, asked like ``Model``."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        for name, module in list(self._model.named_modules()):
            if type(module) is torch.nn.Linear:
                self._model.set_submodule(name, InGroups(module))
        self._kept: Any = None

    def begin(self, prompt: Sequence[int]) -> Any:
        self._kept = None
        return self._step(prompt)

    def follow(self, token: int, place: int) -> Any:
        return self._step([token])

    def end(self) -> None:
        self._kept = None

    def _step(self, tokens: Sequence[int]) -> Any:
        found = self._model(input_ids=torch.tensor([list(tokens)]), past_key_values=self._kept, use_cache=True)
        self._kept = found.past_key_values
        return found.logits[0, -1].log_softmax(-1)


@torch.inference_mode()
def answers(model: Model, prompts: Sequence[Sequence[int]], eos: set[int]) -> list[tuple[list[int], list[Any]]]:
    """Return the greedy answer to each prompt, and the log probabilities at each of its places."""
    found = []
    for prompt in prompts:
        tokens: list[int] = []
        rows = [model.begin(prompt)]
        while len(tokens) < MAX_TOKENS:
            tokens.append(int(rows[-1].argmax()))
            if tokens[-1] in eos or len(tokens) == MAX_TOKENS:
                break
            rows.append(model.follow(tokens[-1], len(prompt) + len(tokens) - 1))
        model.end()
        found.append((tokens, rows))
    return found


@torch.inference_mode()
def compared(
    model: Model | ModelByTorch, prompts: Sequence[Sequence[int]], wanted: Sequence[tuple[list[int], list[Any]]]
) -> dict[str, Any]:
    """Return the figures of a model along the answers of another."""
    divergences, agreed, equal, prefixes = [], [], 0, []
    for prompt, (tokens, rows) in zip(prompts, wanted, strict=True):
        own = [model.begin(prompt)]
        own += [model.follow(token, len(prompt) + i) for i, token in enumerate(tokens[: len(rows) - 1])]
        model.end()
        same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(own, rows, strict=True)]
        divergences += [float((b.exp() * (b - a)).sum()) for a, b in zip(own, rows, strict=True)]
        agreed += same
        equal += all(same)
        prefixes.append((same.index(False) if False in same else len(same)) / len(same))
    return {
        "divergence, mean": f"{np.mean(divergences):.5f}",
        "99th percentile": f"{np.quantile(divergences, 0.99):.4f}",
        "99.9th percentile": f"{np.quantile(divergences, 0.999):.4f}",
        "most probable token agrees": f"{np.mean(agreed):.4f}",
        f"equal answers of {len(prompts)}": equal,
        "tokens up to the first difference": f"{np.mean(prefixes):.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2", help="a directory with a chat model in floats")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="only the first so many")
    parser.add_argument("--forms", nargs="+", choices=[*PLAIN, Q8_0, *LOGGED], default=[*PLAIN, Q8_0, *LOGGED])
    args = parser.parse_args()
    say_kernels()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS[: args.questions]
    ]
    wanted = answers(Model(args.model, dtype="float32"), prompts, {int(tokenizer.eos_token_id)})
    found = [
        {"form": form, **compared(Model(args.model, **settings), prompts, wanted)}
        for form, settings in PLAIN.items()
        if form in args.forms
    ]
    if Q8_0 in args.forms:
        found.append({"form": Q8_0, **compared(ModelByTorch(args.model), prompts, wanted)})
    with tempfile.TemporaryDirectory() as root:
        for quantize in ("int8", "int4"):
            forms = {name: more for name, (kind, more) in LOGGED.items() if kind == quantize and name in args.forms}
            if not forms:
                continue
            folder = Path(root, quantize)
            shutil.copytree(args.model, folder)
            quantize_files(folder, ("chat",), quantize, tokenised(default_texts(), tokenizer))
            for form, more in forms.items():
                model = Model(str(folder), quantization=quantize, **more)
                found.append({"form": form, **compared(model, prompts, wanted)})
    publish("fidelity", found, questions=len(prompts), max_tokens=MAX_TOKENS)


if __name__ == "__main__":
    main()
