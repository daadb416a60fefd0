"""Adapters through the whole engine: each text is what peft's own model continues with, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Outcome, run, take
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import AlreadyExists, Conflict, InvalidField, LimitExceeded, NotFound
from mlflow_llm.serving.interface.settings import EngineSettings

# peft 0.21 reads a property that transformers 5.23 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LLAMA = {
    "small": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
    "rs": {"r": 5, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "down_proj"]},
    "mixed": {"r": 3, "target_modules": ["gate_proj", "up_proj", "q_proj"], "rank_pattern": {"up_proj": 7}},
}
GPT2 = {
    name: {"r": rank, "target_modules": modules, "fan_in_fan_out": True}
    for name, rank, modules in (
        ("small", 2, ["c_attn"]),
        ("all", 8, ["c_attn", "c_proj", "c_fc"]),
        ("rs", 5, ["c_fc"]),
        ("mixed", 3, ["c_proj"]),
    )
}
ADAPTERS = {"llama": LLAMA, "llama_wide": LLAMA, "gpt2": GPT2}
NAMES = (None, *LLAMA)
MAX_TOKENS = 10


class Family:
    """A tiny base model on disk, its adapters in peft's layout, and peft's own continuation of each."""

    def __init__(self, name: str, folder: Path) -> None:
        self.models: dict[str | None, Any] = {None: make_model(FAMILIES[name]())}
        self.bundle: Bundle = save_bundle(self.models[None], folder / "model")
        self.paths: dict[str, str] = {}
        for i, (adapter, config) in enumerate(ADAPTERS[name].items()):
            base = make_model(FAMILIES[name]())
            torch.manual_seed(i)
            self.models[adapter] = get_peft_model(base, LoraConfig(init_lora_weights=False, **config)).eval()
            self.paths[adapter] = str(folder / adapter)
            self.models[adapter].save_pretrained(self.paths[adapter])

    def core(self, *, loaded: bool = True, **more: Any) -> EngineCore:
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 24, **more}
        core = EngineCore(self.bundle, EngineSettings(**settings))
        for name, path in self.paths.items() if loaded else ():
            core.load_adapter(name, path)
        return core

    def expected(self, adapter: str | None, prompt: tuple[int, ...]) -> list[int]:
        return greedy(self.models[adapter], prompt, MAX_TOKENS)


@pytest.fixture(scope="module", params=sorted(ADAPTERS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def core(llama: Family) -> Iterator[EngineCore]:
    core = llama.core()
    yield core
    core.check_integrity()
    core.close()


def ask(request_id: str, prompt: tuple[int, ...], adapter: str | None, **more: Any) -> Any:
    return request_of(request_id, prompt, adapter=adapter, max_tokens=MAX_TOKENS, **more)


def test_a_mixed_batch_equals_peft_one_by_one(family: Family) -> None:
    """Base and four adapters of different ranks, with prompts longer than a chunk, give peft's greedy tokens each."""
    core = family.core()
    cases = {f"{name}/{n}": (name, prompt_of(n, n)) for n in (5, 37) for name in NAMES}
    outcomes = run(core, *(ask(i, prompt, name) for i, (name, prompt) in cases.items()))
    for i, (name, prompt) in cases.items():
        assert outcomes[i].tokens[0] == family.expected(name, prompt), i
    assert len({tuple(outcomes[f"{name}/37"].tokens[0]) for name in NAMES}) == len(NAMES)
    core.close()


def test_segments_beside_a_head_of_few_rows(llama: Family, caplog: pytest.LogCaptureFixture) -> None:
    """A long base prompt and a short adapter prompt run in one step, although the head computes only two rows."""
    core = llama.core(kernels="torch", max_num_batched_tokens=256)
    before = core.health().steps
    outcomes = run(
        core,
        request_of("base", prompt_of(200, 1), max_tokens=1),
        request_of("adapted", prompt_of(5, 2), adapter="small", max_tokens=1),
    )
    assert [len(outcomes[name].tokens[0]) for name in ("base", "adapted")] == [1, 1]
    assert core.health().steps - before == 1
    assert not caplog.records
    core.close()


def test_an_adapter_reuses_only_its_own_prefix(core: EngineCore, llama: Family) -> None:
    """One prompt asked of base and every adapter in turn computes its KV for each; asked again each finds its own."""
    prompt = prompt_of(40, 1)
    for name in NAMES:
        first = run(core, ask("a", prompt, name))["a"]
        assert (first.finished[0].num_cached_tokens, first.tokens[0]) == (0, llama.expected(name, prompt))
    for name in NAMES:
        again = run(core, ask("a", prompt, name))["a"]
        assert (again.finished[0].num_cached_tokens, again.tokens[0]) == (39, llama.expected(name, prompt))


def test_choices_of_an_adapter_share_their_prompt(core: EngineCore, llama: Family) -> None:
    """Within one batch the prompt is shared by choices of one adapter and not with those of another."""
    prompt = prompt_of(40, 2)
    outcomes = run(core, ask("a", prompt, "all", n=2), ask("b", prompt, "rs", n=2), ask("c", prompt, None))
    cached = [[finished.num_cached_tokens for finished in o.finished.values()] for o in outcomes.values()]
    assert [sorted(each) for each in cached] == [[0, 39], [0, 39], [0]]
    for outcome, name in zip(outcomes.values(), ("all", "rs", None), strict=True):
        assert all(tokens == llama.expected(name, prompt) for tokens in outcome.tokens.values())


def test_preemption_keeps_each_on_its_adapter(llama: Family) -> None:
    """With memory for a fraction of the batch, sequences computed anew still run with their own adapter."""
    core = llama.core(kv_cache_memory=90 * 2 * 2 * 8 * 2 * 4)  # layers, K and V heads, head width, K and V, float32
    prompts = {str(name): prompt_of(25, i) for i, name in enumerate(NAMES)}
    outcomes = run(core, *(ask(str(name), prompts[str(name)], name) for name in NAMES))
    for name in NAMES:
        assert outcomes[str(name)].tokens[0] == llama.expected(name, prompts[str(name)])
    core.close()


def test_an_unknown_adapter_fails_only_its_request(core: EngineCore, llama: Family) -> None:
    """A name that is not loaded is named in the error, and the request beside it is answered."""
    outcomes = run(core, ask("bad", prompt_of(9, 0), "nobody"), ask("good", prompt_of(9, 0), "all"))
    failed = outcomes["bad"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == (NotFound("").kind, "adapter")
    assert "nobody" in failed.message
    assert outcomes["good"].tokens[0] == llama.expected("all", prompt_of(9, 0))


def test_load_and_unload_while_others_generate(llama: Family) -> None:
    """Adapters come and go between steps; one in use stays, and what runs does not notice."""
    core, prompt = llama.core(loaded=False), prompt_of(12, 3)
    core.load_adapter("all", llama.paths["all"])
    outcomes = {"a": Outcome(), "b": Outcome()}
    core.add(ask("a", prompt, "all"))
    take(core, outcomes, max_steps=3)
    core.load_adapter("rs", llama.paths["rs"])
    core.add(ask("b", prompt, "rs"))
    with pytest.raises(Conflict, match="all"):
        core.unload_adapter("all")
    take(core, outcomes, max_steps=2)
    core.load_adapter("small", llama.paths["small"])
    core.unload_adapter("small")
    take(core, outcomes)
    assert outcomes["a"].tokens[0] == llama.expected("all", prompt)
    assert outcomes["b"].tokens[0] == llama.expected("rs", prompt)
    core.unload_adapter("all")
    assert [info.name for info in core.adapters()] == ["rs"]
    refused = run(core, ask("c", prompt, "all"))["c"].failed
    assert refused is not None
    assert refused.param == "adapter"
    core.close()


def test_a_replaced_adapter_answers_with_its_new_weights(llama: Family) -> None:
    """Unloading gives the name's KV back; loaded again with other weights, nothing of the old is used."""
    core, prompt = llama.core(loaded=False), prompt_of(40, 4)
    for source in ("all", "mixed", "all"):
        core.load_adapter("x", llama.paths[source])
        outcome = run(core, ask("a", prompt, "x"))["a"]
        assert outcome.finished[0].num_cached_tokens == 0
        assert outcome.tokens[0] == llama.expected(source, prompt)
        with pytest.raises(AlreadyExists, match="x"):
            core.load_adapter("x", llama.paths["rs"])
        core.unload_adapter("x")
        assert core.health().kv_tokens_used == 0
    core.close()


def test_refusals_leave_the_engine_as_it_was(llama: Family, tmp_path: Path) -> None:
    """A directory without an adapter, one too many and an unknown name are refused; what is loaded goes on."""
    core, prompt = llama.core(loaded=False, max_adapters=1), prompt_of(9, 5)
    with pytest.raises(InvalidField, match="adapter_config"):
        core.load_adapter("bad", str(tmp_path))
    core.load_adapter("rs", llama.paths["rs"])
    with pytest.raises(LimitExceeded, match="max_adapters"):
        core.load_adapter("all", llama.paths["all"])
    with pytest.raises(NotFound, match="all"):
        core.unload_adapter("all")
    assert [(info.name, info.rank) for info in core.adapters()] == [("rs", 5)]
    assert run(core, ask("a", prompt, "rs"))["a"].tokens[0] == llama.expected("rs", prompt)
    core.close()


def test_adapters_of_the_bundle_are_there_from_the_start(llama: Family) -> None:
    """Adapters saved with the model are loaded when the engine starts."""
    bundle = Bundle(**{f: getattr(llama.bundle, f) for f in Bundle.__struct_fields__} | {"adapters": llama.paths})
    core = EngineCore(bundle, EngineSettings(max_num_seqs=2, kv_cache_memory=1 << 24))
    assert [info.name for info in core.adapters()] == list(llama.paths)
    assert run(core, ask("a", prompt_of(9, 6), "mixed"))["a"].tokens[0] == llama.expected("mixed", prompt_of(9, 6))
    core.close()
