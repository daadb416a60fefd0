"""A thousand requests of every kind, whose tokens, log probabilities and ends are the same with drafts and without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_runs import Outcome, run
from grammar_runs import Texts, bundle_of, lark, regex, schema
from peft import LoraConfig, get_peft_model
from tiny_models import request_of
from transformers import AutoModelForCausalLM

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.request import DraftTokens, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = [
    pytest.mark.skipif(library.library() is None, reason="speculation is the native step's"),
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

PROMPT = '{"name": "Bob", "age": 12} the quick brown fox [1, 2] '
END = 2
GRAMMARS: list[Grammar] = [
    schema({"type": "array", "items": {"enum": ["yes", "no", "maybe so"]}, "minItems": 3, "maxItems": 12}),
    schema(
        {
            "type": "object",
            "properties": {"name": {"enum": ["Bob", "Anna"]}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        },
        fast_forward=True,
    ),
    schema({"type": "object", "additionalProperties": {"type": "integer"}}, distinct_keys=True),
    regex("(the quick brown fox ){2,6}[a-z]{0,9}"),
    lark('start: (WORD ", ")+ WORD\nWORD: "yes" | "no" | /[a-f]{3}/', fast_forward=True),
]
ADAPTERS = {"small": ["q_proj", "v_proj"], "all": "all-linear"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of("byte_level", tmp_path_factory.mktemp("wide"), hidden_size=64)


@pytest.fixture(scope="module")
def adapters(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for seed, (name, modules) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(bundle.model_dir)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
        found[name] = tmp_path_factory.mktemp(name)
        get_peft_model(base, config).save_pretrained(found[name])
    return found


@pytest.fixture
def cores(bundle: Bundle, adapters: dict[str, Path]) -> Iterator[tuple[EngineCore, EngineCore]]:
    """Return a core with drafts and one without."""
    pair = []
    for speculation in ("auto", "none"):
        settings: Any = {"max_num_batched_tokens": 64, "kv_cache_memory": 1 << 24, "speculation": speculation}
        core = EngineCore(bundle, EngineSettings(max_num_seqs=12, **settings))
        for name, path in adapters.items():
            core.load_adapter(name, str(path))
        pair.append(core)
    yield pair[0], pair[1]
    for core in pair:
        core.check_integrity()
        core.close()


def any_request(rng: random.Random, number: int, texts: Texts) -> ValidRequest:
    words = PROMPT.split(" ")
    text = " ".join(rng.choice(words) for _ in range(rng.randint(3, 12))) + PROMPT
    prompt = texts.ids(text)
    max_tokens = rng.randint(1, 28)
    likely = rng.sample(prompt, 4)
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, 0, min(5, max_tokens)]),
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 5]),
        "min_p": rng.choice([0.0, 0.0, 0.1]),
        "typical_p": rng.choice([1.0, 1.0, 1.0, 0.9]),
        "repetition_penalty": rng.choice([1.0, 1.0, 0.7]),
        "presence_penalty": rng.choice([0.0, -1.5]),
        "frequency_penalty": rng.choice([0.0, 0.0, -0.5]),
        "logit_bias": tuple((token, rng.choice([2.0, 30.0])) for token in dict.fromkeys(likely)),
        "logprobs": rng.choice([None, None, 0, 2]),
        "stop_token_ids": rng.choice([(END,), (END, prompt[-1]), ()]),
        "grammar": rng.choice([None, *GRAMMARS]),
        "no_repeat_ngram_size": rng.choice([0, 0, 0, 0, 6]),
        "stop_sequences": rng.choice([(), (), (prompt[-2:],)]),
        "n": rng.choice([1, 1, 1, 3]),
        "stream": rng.random() < 0.5,
        "stop": rng.choice([(), ("fox",)]),
        "adapter": rng.choice([None, *ADAPTERS]),
        "seed": number,
    }
    return request_of(f"r{number}", prompt, **fields)


def again(rng: random.Random, request: ValidRequest, found: Outcome, **sampling: Any) -> ValidRequest:
    """Return the same request with its text as prediction, a few tokens changed; half of them are resumed."""
    text = list(found.tokens[0])
    for _ in range(rng.randint(0, 2)):
        place = rng.randrange(len(text))
        text[place : place + 1] = [rng.randrange(3, 300) for _ in range(rng.randint(0, 3))] or text[:1]
    resumed = rng.randrange(len(found.tokens[0])) if rng.random() < 0.5 else 0
    sequences = tuple(
        msgspec.structs.replace(one, resumed_token_ids=tuple(found.tokens[i][: min(resumed, len(found.tokens[i]) - 1)]))
        for i, one in enumerate(request.sequences)
    )
    new = msgspec.structs.replace(request.sampling, draft=DraftTokens(token_ids=tuple(text)), **sampling)
    return msgspec.structs.replace(request, sampling=new, sequences=sequences)


def same(found: Outcome, wanted: Outcome, what: ValidRequest) -> None:
    assert found.failed == wanted.failed, what
    if found.failed is not None:  # it may have no tokens: how far its siblings had come depends on the steps
        return
    assert found.tokens == wanted.tokens, what
    assert found.logprobs == wanted.logprobs, what  # to the last bit
    ends = [{i: (f.reason, f.num_generated_tokens) for i, f in one.finished.items()} for one in (found, wanted)]
    assert ends[0] == ends[1], what


def test_a_thousand_requests_have_the_same_texts(cores: tuple[EngineCore, EngineCore], bundle: Bundle) -> None:
    """At every temperature, with penalties, grammars, adapters, log probabilities, several choices, stops, min_tokens
    and predictions, resumed or not, nothing differs. Drafts are accepted and rejected within grammars too."""
    drafting, plain = cores
    texts, rng = Texts(bundle), random.Random(7)
    number, taken = 0, {"grammar": 0, "adapter": 0, "prediction": 0}
    while number < 1000:
        requests = [any_request(rng, number + i, texts) for i in range(rng.randint(1, 6))]
        number += len(requests)
        wanted = run(plain, *requests)
        if rng.random() < 0.5:
            requests = [
                again(rng, one, wanted[one.request_id]) if wanted[one.request_id].tokens[0] else one for one in requests
            ]
            wanted = run(plain, *requests)
        found = run(drafting, *requests)
        for request in requests:
            outcome = found[request.request_id]
            same(outcome, wanted[request.request_id], request)
            for end in outcome.finished.values():
                if end.drafts is not None:
                    taken["grammar"] += end.drafts.accepted * (request.sampling.grammar is not None)
                    taken["adapter"] += end.drafts.accepted * (request.adapter is not None)
                    taken["prediction"] += end.drafts.predicted_accepted
    speculation = drafting.parts.scheduler.speculation
    assert min(taken.values()) > 100
    assert 1000 < speculation.num_taken < speculation.num_proposed - 300
