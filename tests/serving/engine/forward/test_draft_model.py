"""Draft models: most drafts of a similar model are accepted at any temperature, and no text changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_runs import Outcome, run
from grammar_runs import bundle_of, regex, schema
from tiny_models import COMMON, FAMILIES, make_model, request_of, save_bundle
from tokenizer_kinds import KINDS, save

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.interface.bundle import Bundle, DraftBundle, draft_of
from mlflow_llm.serving.interface.errors import InvalidField, PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = pytest.mark.skipif(library.library() is None, reason="speculation is the native step's")

KINDS_OF_DRAFT = ("alike", "stranger", "other_code")


def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of("byte_level", directory(tmp_path_factory), hidden_size=64)


@pytest.fixture(scope="module")
def drafts(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, DraftBundle]:
    """Save a noisy copy of the large model, an unrelated one, and one that the native kernels do not run."""
    from transformers import AutoModelForCausalLM

    alike = AutoModelForCausalLM.from_pretrained(bundle.model_dir)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in alike.parameters():
            parameter.add_(0.003 * torch.randn_like(parameter))
    size = alike.config.vocab_size
    stranger = make_model(FAMILIES["llama_wide"]().__class__(**COMMON | {"vocab_size": size - 3, "hidden_size": 64}))
    other = make_model(type(FAMILIES["gpt2"]())(**FAMILIES["gpt2"]().to_diff_dict() | {"vocab_size": size}))
    found = {}
    for name, model in zip(KINDS_OF_DRAFT, (alike, stranger, other), strict=True):
        saved = save_bundle(model, directory(tmp_path_factory), name)
        found[name] = draft_of(name, msgspec.structs.replace(saved, tokenizer_dir=bundle.tokenizer_dir))
    return found


def core_of(bundle: Bundle, draft: DraftBundle | None = None, **more: Any) -> EngineCore:
    if draft is not None:
        bundle = msgspec.structs.replace(bundle, draft=draft)
        more["draft_model"] = draft.uri
    core = EngineCore(bundle, EngineSettings(**{"kv_cache_memory": 1 << 24, "max_num_batched_tokens": 32} | more))
    if draft is not None and core.parts.scheduler.speculation is not None:
        core.parts.scheduler.speculation.model.cost = 0.1  # as if it were small: here both have the same size
    return core


def any_request(rng: random.Random, number: int) -> Any:
    prompt = [rng.randrange(3, 300) for _ in range(rng.randint(1, 60))]
    grammars = [None, None, regex("[a-z ]{3,30}"), schema({"type": "array", "items": {"type": "integer"}})]
    fields: dict[str, Any] = {
        "max_tokens": rng.randint(1, 30),
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 5]),
        "frequency_penalty": rng.choice([0.0, 0.5]),
        "logprobs": rng.choice([None, 1]),
        "stop_token_ids": rng.choice([(2,), (2, prompt[0])]),
        "grammar": rng.choice(grammars),
        "n": rng.choice([1, 1, 2]),
        "seed": number,
    }
    return request_of(f"r{number}", prompt, **fields)


def same(found: Outcome, wanted: Outcome) -> None:
    assert (found.failed, found.tokens, found.logprobs) == (wanted.failed, wanted.tokens, wanted.logprobs)
    assert {i: f.reason for i, f in found.finished.items()} == {i: f.reason for i, f in wanted.finished.items()}


@pytest.mark.parametrize("kind", KINDS_OF_DRAFT)
def test_drafts_of_a_model_change_no_text(kind: str, bundle: Bundle, drafts: dict[str, DraftBundle]) -> None:
    """No draft model changes texts, log probabilities or ends: alone or batched, within grammars, with little
    memory."""
    tight = 300 * 2 * 2 * 16 * 2 * 4
    drafting, plain = core_of(bundle, drafts[kind], kv_cache_memory=tight), core_of(bundle, speculation="none")
    rng, number = random.Random(5), 0
    while number < 80:
        requests = [any_request(rng, number + i) for i in range(rng.randint(1, 3))]
        number += len(requests)
        found, wanted = run(drafting, *requests), run(plain, *requests)
        for request in requests:
            same(found[request.request_id], wanted[request.request_id])
    speculation = drafting.parts.scheduler.speculation
    assert speculation.num_proposed > 50
    speculation.model.cache.check_integrity()
    assert not speculation.model.is_broken
    drafting.close(), plain.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_drafts_of_a_similar_model_are_accepted(
    temperature: float, bundle: Bundle, drafts: dict[str, DraftBundle]
) -> None:
    """Most drafts of a similar model are accepted at any temperature; those of an unrelated model are given up."""
    taken = {}
    for kind in ("alike", "stranger"):
        core = core_of(bundle, drafts[kind])
        steps = core.health().steps
        for number in range(8):
            prompt = np.random.default_rng(number).integers(3, 300, size=20).tolist()
            run(core, request_of("a", prompt, max_tokens=60, temperature=temperature, seed=number))
        health = core.health()
        taken[kind] = (health.accepted_tokens, health.draft_tokens, health.steps - steps)
        core.close()
    accepted, proposed, steps = taken["alike"]
    assert accepted > 0.6 * proposed > 100
    assert steps < 0.6 * 8 * 60
    assert taken["stranger"][0] < accepted / 2


def test_long_prompts_are_read_in_parts(bundle: Bundle, drafts: dict[str, DraftBundle]) -> None:
    """No step of the draft model exceeds the max tokens of a step, and a prompt read before is not read again."""
    core = core_of(bundle, drafts["alike"])
    forward, sizes = core.parts.scheduler.speculation.model.forward, []
    original = forward.forward

    def counted(step: StepInput) -> Any:
        sizes.append(len(step.ids))
        return original(step)

    forward.forward = counted
    prompt = np.random.default_rng(0).integers(3, 300, size=150).tolist()
    run(core, request_of("a", prompt, max_tokens=40))
    assert max(sizes) == 32
    assert sum(sizes) < 150 + 2 * 40
    sizes.clear()
    run(core, request_of("b", prompt, max_tokens=10, temperature=1.0))
    assert sum(sizes) < 40
    core.close()


def test_a_model_that_costs_too_much_is_hardly_asked(bundle: Bundle, drafts: dict[str, DraftBundle]) -> None:
    """A draft model as large as the target saves nothing, so it is used only now and then."""
    core = core_of(bundle, drafts["alike"])
    core.parts.scheduler.speculation.model.cost = 1.0
    prompt = np.random.default_rng(0).integers(3, 300, size=20).tolist()
    run(core, request_of("a", prompt, max_tokens=100, temperature=1.5))
    assert 0 < core.health().draft_tokens < 20
    core.close()


def test_a_draft_model_that_fails_is_left(bundle: Bundle, drafts: dict[str, DraftBundle]) -> None:
    """If the draft model fails, the engine continues without it and the text is the same."""
    core, plain = core_of(bundle, drafts["alike"]), core_of(bundle, speculation="none")

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    core.parts.scheduler.speculation.model.forward.forward = fail
    request = request_of("a", [5, 6, 7], max_tokens=20, temperature=1.0)
    same(run(core, request)["a"], run(plain, request)["a"])
    assert core.parts.scheduler.speculation.model.is_broken
    core.close(), plain.close()


def test_other_vocabularies_are_refused(bundle: Bundle, drafts: dict[str, DraftBundle], tmp_path: Path) -> None:
    """A draft model with another vocabulary is refused by both names and a differing token, or by sizes without
    tokenizers."""
    alike = drafts["alike"]
    other = str(save(KINDS["unigram"](), tmp_path / "tokenizer"))
    with pytest.raises(PackagingError, match=r"draft_model: alike does not have this model's vocabulary: '.+' has "):
        core_of(bundle, msgspec.structs.replace(alike, tokenizer_dir=other))
    untold = msgspec.structs.replace(drafts["stranger"], tokenizer_dir="")
    with pytest.raises(
        PackagingError, match=r"draft_model: stranger does not have this model's vocabulary: it has \d+"
    ):
        core_of(bundle, untold)


def test_settings_that_leave_it_without_use(bundle: Bundle, drafts: dict[str, DraftBundle]) -> None:
    """A draft model is refused with speculation none, for embedding models and if none was found; without native
    kernels the engine reports that it is unused."""
    with pytest.raises(InvalidField, match="draft_model: 'x' is not allowed; expected null with speculation none"):
        EngineSettings(draft_model="x", speculation="none")
    with pytest.raises(PackagingError, match="draft_model: a does embeddings"):
        draft_of("a", msgspec.structs.replace(bundle, tasks=("embeddings",)))
    with pytest.raises(PackagingError, match="draft_model: x was not found"):
        EngineCore(bundle, EngineSettings(draft_model="x", kv_cache_memory=1 << 24))
    core = core_of(bundle, drafts["alike"], kernels="torch")
    assert core.parts.scheduler.speculation is None
    assert run(core, request_of("a", [5, 6], max_tokens=3))["a"].failed is None
    core.close()
