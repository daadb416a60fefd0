"""The adapter cache: loading with requests and from disk, within a memory budget, while other requests generate."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_runs import Outcome, checked_cores, run, take
from lora_tensors import task_of
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.errors import Conflict, InvalidField, LimitExceeded, Overloaded
from mlflow_llm.serving.interface.request import LoraTask
from mlflow_llm.serving.interface.settings import EngineSettings

# peft 0.21 reads a property that transformers 5.23 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

MAX_TOKENS = 5
RANKS = {"a": 2, "b": 3, "c": 4, "d": 2, "e": 3, "f": 8}
PROMPTS = tuple(prompt_of(n, n) for n in (6, 11, 30))
MISS = "LoRA task {} not found in cache. Please send LoRA weights with request"
FULL = "Cache is full. There are no done tasks to evict"


class Adapters:
    """A tiny model whose step is native where kernels are, six adapters, and peft's text of each for each prompt."""

    def __init__(self, folder: Path) -> None:
        model = make_model(FAMILIES["llama_wide"]())
        self.bundle = save_bundle(model, folder / "model")
        self.expected = {(None, prompt): greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS}
        self.paths: dict[str, str] = {}
        for i, (name, rank) in enumerate(RANKS.items()):
            torch.manual_seed(i)
            config = LoraConfig(r=rank, init_lora_weights=False, target_modules="all-linear")
            adapted = get_peft_model(make_model(FAMILIES["llama_wide"]()), config).eval()
            self.paths[name] = str(folder / name)
            adapted.save_pretrained(self.paths[name])
            for prompt in PROMPTS:
                self.expected[name, prompt] = greedy(adapted, prompt, MAX_TOKENS)
        self.tasks = {name: task_of(path, 0) for name, path in self.paths.items()}
        probe = self.core()
        self.size = probe.parts.lora.read("f", self.paths["f"]).num_bytes
        probe.close()

    def core(self, *, adapters: tuple[str, ...] = (), default: str | None = None, **settings: Any) -> EngineCore:
        paths = {name: self.paths[name] for name in adapters}
        bundle = msgspec.structs.replace(self.bundle, adapters=paths, default_adapter=default)
        return EngineCore(bundle, EngineSettings(**{"max_num_seqs": 8, "kv_cache_memory": 1 << 24} | settings))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def core_of(adapters: Adapters) -> Any:
    """Yield ``core_of(adapters=…, **settings)``; each core is checked and closed at the end."""
    with checked_cores(adapters.core) as make:
        yield make


def ask(request_id: str, prompt: tuple[int, ...], **more: Any) -> Any:
    return request_of(request_id, prompt, max_tokens=MAX_TOKENS, **more)


def named(task: LoraTask, task_id: int) -> LoraTask:
    return msgspec.structs.replace(task, task_id=task_id)


def text_of(core: EngineCore, prompt: tuple[int, ...], **more: Any) -> list[int] | str:
    """Return the generated tokens, or the text of the error."""
    outcome = run(core, ask("one", prompt, **more))["one"]
    return outcome.failed.message if outcome.failed is not None else outcome.tokens[0]


def test_a_task_is_sent_once_and_then_named(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """The first request of a task brings the weights and later ones only the id; an unknown id is TensorRT-LLM's
    error."""
    core = core_of()
    assert text_of(core, PROMPTS[0], lora_task=LoraTask(task_id=42)) == MISS.format(42)
    for name, task_id in (("b", 42), ("f", 2**64 - 1)):
        task = named(adapters.tasks[name], task_id)
        assert text_of(core, PROMPTS[0], lora_task=task) == adapters.expected[name, PROMPTS[0]]
        assert text_of(core, PROMPTS[1], lora_task=LoraTask(task_id=task_id)) == adapters.expected[name, PROMPTS[1]]
    assert core.adapters() == ()


def test_a_task_id_is_one_of_its_owner_alone(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """A tenant cannot use another tenant's task id; weights it sends under that id are its own."""
    core = core_of()
    task = named(adapters.tasks["b"], 7)
    assert text_of(core, PROMPTS[0], lora_task=task, tenant="acme") == adapters.expected["b", PROMPTS[0]]
    assert text_of(core, PROMPTS[0], lora_task=LoraTask(task_id=7), tenant="other") == MISS.format(7)
    other = named(adapters.tasks["c"], 7)
    assert text_of(core, PROMPTS[0], lora_task=other, tenant="other") == adapters.expected["c", PROMPTS[0]]
    again = LoraTask(task_id=7)
    assert text_of(core, PROMPTS[0], lora_task=again, tenant="acme") == adapters.expected["b", PROMPTS[0]]


def test_requests_at_once_load_a_task_once(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """Sixteen concurrent first requests with the same weights, and later ones that resend them, cause a single load."""
    core = core_of()
    task = named(adapters.tasks["d"], 1)
    outcomes = run(core, *(ask(str(i), PROMPTS[i % 3], lora_task=task) for i in range(16)))
    assert all(outcomes[str(i)].tokens[0] == adapters.expected["d", PROMPTS[i % 3]] for i in range(16))
    text_of(core, PROMPTS[0], lora_task=task)
    assert core.request_adapters.num_loads == 1


def test_new_weights_of_a_task_serve_later_requests(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """New weights for a task id serve later requests; a running request ends on the old weights, which are then
    freed."""
    core = core_of()
    outcomes = {"old": Outcome(), "new": Outcome()}
    core.add(ask("old", PROMPTS[2], lora_task=named(adapters.tasks["a"], 5)))
    take(core, outcomes, max_steps=2)
    core.add(ask("new", PROMPTS[2], lora_task=named(adapters.tasks["f"], 5)))
    take(core, outcomes)
    assert outcomes["old"].tokens[0] == adapters.expected["a", PROMPTS[2]]
    assert outcomes["new"].tokens[0] == adapters.expected["f", PROMPTS[2]]
    assert text_of(core, PROMPTS[2], lora_task=LoraTask(task_id=5)) == adapters.expected["f", PROMPTS[2]]
    assert core.request_adapters.num_bytes == adapters.size


def test_a_named_adapter_is_replaced_in_place(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """With ``replace`` a name means the new weights at once, and running requests end on the old."""
    core = core_of()
    core.load_adapter("x", adapters.paths["a"])
    outcomes = {"old": Outcome(), "new": Outcome()}
    core.add(ask("old", PROMPTS[2], adapter="x"))
    take(core, outcomes, max_steps=2)
    core.load_adapter("x", adapters.paths["f"], replace=True)
    core.add(ask("new", PROMPTS[2], adapter="x"))
    with pytest.raises(Conflict, match="x"):
        core.unload_adapter("x")
    take(core, outcomes)
    assert outcomes["old"].tokens[0] == adapters.expected["a", PROMPTS[2]]
    assert outcomes["new"].tokens[0] == adapters.expected["f", PROMPTS[2]]
    assert [one.path for one in core.adapters()] == [adapters.paths["f"]]
    core.unload_adapter("x")
    assert core.request_adapters.num_bytes == 0


def test_idle_adapters_make_room_the_longest_unused_first(
    adapters: Adapters, core_of: Callable[..., EngineCore]
) -> None:
    """A task that is evicted misses; a named one is read from disk again; the default one stays."""
    core = core_of(adapters=("f", "a"), default="f", adapter_memory=int(2.5 * adapters.size))
    for task_id, name in ((1, "f"), (2, "f")):  # the second takes the place of what was unused longest, "a"
        task = named(adapters.tasks[name], task_id)
        assert text_of(core, PROMPTS[0], lora_task=task) == adapters.expected[name, PROMPTS[0]]
    assert text_of(core, PROMPTS[0], lora_task=LoraTask(task_id=1)) == MISS.format(1)
    assert text_of(core, PROMPTS[0], lora_task=LoraTask(task_id=2)) == adapters.expected["f", PROMPTS[0]]
    assert text_of(core, PROMPTS[0], adapter="f") == adapters.expected["f", PROMPTS[0]]
    loads = core.request_adapters.num_loads
    assert text_of(core, PROMPTS[0], adapter="a") == adapters.expected["a", PROMPTS[0]]
    assert text_of(core, PROMPTS[0], adapter="f") == adapters.expected["f", PROMPTS[0]]
    assert core.request_adapters.num_loads <= loads + 1  # "f" never left
    assert {one.name for one in core.adapters()} == {"a", "f"}


def test_a_tenant_that_floods_evicts_its_own(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """Tasks of others within their share stay, unused as they are, and so do named adapters."""
    core = core_of(adapters=("f",), adapter_memory=int(3.5 * adapters.size))
    text_of(core, PROMPTS[0], lora_task=named(adapters.tasks["f"], 1), tenant="calm")
    for task_id in range(8):
        task = named(adapters.tasks["f"], task_id)
        assert text_of(core, PROMPTS[0], lora_task=task, tenant="flood") == adapters.expected["f", PROMPTS[0]]
    again = LoraTask(task_id=1)
    assert text_of(core, PROMPTS[0], lora_task=again, tenant="calm") == adapters.expected["f", PROMPTS[0]]
    assert text_of(core, PROMPTS[0], lora_task=LoraTask(task_id=6), tenant="flood") == MISS.format(6)
    loads = core.request_adapters.num_loads
    assert text_of(core, PROMPTS[0], adapter="f") == adapters.expected["f", PROMPTS[0]]
    assert core.request_adapters.num_loads == loads


def test_pinned_adapters_are_never_evicted(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """Pinned adapters are never evicted, and an adapter that cannot fit beside them is refused."""
    core = core_of(adapters=("f", "a"), pinned_adapters=("f",), adapter_memory=int(2.5 * adapters.size))
    with pytest.raises(LimitExceeded, match=r"allows beside pinned adapters: \d+"):
        core_of(adapters=("f",), pinned_adapters=("f",), adapter_memory=int(1.5 * adapters.size)).load_adapter(
            "g", adapters.paths["f"], pinned=True
        )
    core.load_adapter("x", adapters.paths["f"], pinned=True)
    for task_id in range(3):
        text_of(core, PROMPTS[0], lora_task=named(adapters.tasks["a"], task_id))
    refused = text_of(core, PROMPTS[0], lora_task=named(adapters.tasks["f"], 9))
    assert "lora_weights" in str(refused)
    assert "beside pinned adapters" in str(refused)
    loads = core.request_adapters.num_loads
    for name in ("f", "x"):
        assert text_of(core, PROMPTS[0], adapter=name) == adapters.expected["f", PROMPTS[0]]
    assert core.request_adapters.num_loads == loads
    core.load_adapter("x", adapters.paths["f"], replace=True)  # not pinned any more
    assert text_of(core, PROMPTS[0], lora_task=named(adapters.tasks["f"], 9)) == adapters.expected["f", PROMPTS[0]]
    assert text_of(core, PROMPTS[0], adapter="x") == adapters.expected["f", PROMPTS[0]]
    assert core.request_adapters.num_loads == loads + 3
    with pytest.raises(InvalidField, match=r"pinned_adapters: 'z' is not allowed; .* came with the model: a, f"):
        core_of(adapters=("f", "a"), pinned_adapters=("z",))


def test_evicted_adapters_come_back_from_copies(
    adapters: Adapters, core_of: Callable[..., EngineCore], tmp_path: Path
) -> None:
    """Evicted adapters are reloaded from host copies without files or weights, unless the copies' memory limit dropped
    them."""
    folder = tmp_path / "x"
    shutil.copytree(adapters.paths["f"], folder)
    core = core_of(adapter_memory=int(1.5 * adapters.size), adapter_host_memory=int(2.5 * adapters.size))
    core.load_adapter("x", str(folder))
    shutil.rmtree(folder)
    for task_id in (1, 2):
        text_of(core, PROMPTS[0], lora_task=named(adapters.tasks["f"], task_id))
    outcomes = run(core, *(ask(str(i), PROMPTS[i % 3], adapter="x") for i in range(8)))
    assert all(outcomes[str(i)].tokens[0] == adapters.expected["f", PROMPTS[i % 3]] for i in range(8))
    assert text_of(core, PROMPTS[0], lora_task=LoraTask(task_id=1)) == adapters.expected["f", PROMPTS[0]]
    assert core.request_adapters.num_loads == 3
    assert core.request_adapters.num_host_bytes == 2 * adapters.size
    text_of(core, PROMPTS[0], lora_task=named(adapters.tasks["f"], 3))
    assert text_of(core, PROMPTS[0], lora_task=LoraTask(task_id=2)) == MISS.format(2)
    core.check_integrity()


def test_a_copy_that_finds_no_room_stays_a_copy(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """The request is refused as with any other adapter, and taken when there is room."""
    core = core_of(adapter_memory=int(1.5 * adapters.size), adapter_host_memory=1 << 30)
    for task_id in (1, 2):
        text_of(core, PROMPTS[0], lora_task=named(adapters.tasks["f"], task_id))
    outcomes = {"held": Outcome(), "next": Outcome()}
    core.add(ask("held", PROMPTS[2], lora_task=LoraTask(task_id=2)))
    core.add(ask("next", PROMPTS[2], lora_task=LoraTask(task_id=1)))
    take(core, outcomes)
    refused = outcomes["next"].failed
    assert refused is not None
    assert refused.message == FULL
    assert text_of(core, PROMPTS[2], lora_task=LoraTask(task_id=1)) == adapters.expected["f", PROMPTS[2]]


def test_all_of_an_adapter_goes_to_the_host(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """A host copy keeps factors, gains and shifts with their ranks and scaling, and restores them."""
    pool = core_of().parts.lora
    read = pool.read("f", adapters.paths["f"])
    with_gains = replace(
        read, factors={n: replace(f, gain=f.b[:, 0], shift=f.b[:, 1]) for n, f in read.factors.items()}
    )
    pool.device = torch.device("meta")
    there = pool.to_device(with_gains)
    assert {t.device.type for f in there.factors.values() for t in (f.a, f.b, f.gain, f.shift)} == {"meta"}
    assert (there.rank, there.num_bytes) == (with_gains.rank, with_gains.num_bytes)
    here = pool.to_host(with_gains)
    assert all(torch.equal(f.shift, with_gains.factors[n].shift) for n, f in here.factors.items())
    assert not pool.is_on_host
    pool.device = torch.device("cpu")
    assert pool.is_on_host


def test_a_cache_full_of_adapters_in_use_refuses_the_next(
    adapters: Adapters, core_of: Callable[..., EngineCore]
) -> None:
    """A full cache refuses a request with TensorRT-LLM's message and takes it once an adapter is idle."""
    core = core_of(adapter_memory=int(1.5 * adapters.size))
    outcomes = {"held": Outcome(), "next": Outcome()}
    core.add(ask("held", PROMPTS[2], lora_task=named(adapters.tasks["f"], 1)))
    core.add(ask("next", PROMPTS[2], lora_task=named(adapters.tasks["f"], 2)))
    take(core, outcomes)
    refused = outcomes["next"].failed
    assert refused is not None
    assert (refused.kind, refused.message, refused.retry_after) == ("overloaded", FULL, 1.0)
    assert outcomes["held"].tokens[0] == adapters.expected["f", PROMPTS[2]]
    second = named(adapters.tasks["f"], 2)
    assert text_of(core, PROMPTS[2], lora_task=second) == adapters.expected["f", PROMPTS[2]]
    small = core_of(adapter_memory=1000)
    assert "adapter_memory" in str(text_of(small, PROMPTS[0], lora_task=second))
    with pytest.raises(LimitExceeded, match="adapter_memory"):
        small.load_adapter("a", adapters.paths["a"])


def test_weights_that_do_not_fit_fail_their_request_alone(
    adapters: Adapters, core_of: Callable[..., EngineCore]
) -> None:
    """The row is named, and the request beside it is answered."""
    core = core_of()
    bad = LoraTask(task_id=1, weights=b"\0" * 8, config=((1, 99, 1),))
    outcomes = run(core, ask("bad", PROMPTS[0], lora_task=bad), ask("good", PROMPTS[0]))
    refused = outcomes["bad"].failed
    assert refused is not None
    assert (refused.kind, refused.param) == ("invalid_field", "lora_config[0][1]")
    assert outcomes["good"].tokens[0] == adapters.expected[None, PROMPTS[0]]


def test_an_evicted_adapter_whose_files_changed_is_not_taken_for_the_old_one(
    adapters: Adapters, core_of: Callable[..., EngineCore], tmp_path: Path
) -> None:
    """Read again it would answer with other weights under the same name: the request fails, loading it anew helps."""
    folder = tmp_path / "x"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes((Path(adapters.paths["f"]) / name).read_bytes())
    core = core_of(adapter_memory=int(1.5 * adapters.size))
    core.load_adapter("x", str(folder))
    text_of(core, PROMPTS[0], lora_task=named(adapters.tasks["f"], 1))
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").write_bytes(
        (Path(adapters.paths["f"]) / "adapter_model.safetensors").read_bytes() + b""
    )
    assert "changed on disk" in str(text_of(core, PROMPTS[0], adapter="x"))
    core.load_adapter("x", str(folder), replace=True)
    assert text_of(core, PROMPTS[0], adapter="x") == adapters.expected["f", PROMPTS[0]]


def test_prefixes_are_those_of_the_weights(adapters: Adapters, core_of: Callable[..., EngineCore]) -> None:
    """A task finds its own prefix again, also after a replaced one; a task of other weights finds none."""
    core = core_of()
    prompt = PROMPTS[2]
    for name, task_id, cached in (("a", 1, 0), ("a", 1, 29), ("b", 2, 0), ("b", 1, 0), ("b", 1, 29)):
        outcome = run(core, ask("one", prompt, lora_task=named(adapters.tasks[name], task_id)))["one"]
        assert (outcome.finished[0].num_cached_tokens, outcome.tokens[0]) == (cached, adapters.expected[name, prompt])


def test_random_operations_give_each_adapter_its_own_text(
    adapters: Adapters, core_of: Callable[..., EngineCore]
) -> None:
    """2,000 loads, unloads, replacements, evictions and requests in a budget of three adapters: every text that is
    not refused is that of its adapter alone, and each refusal is one that is due."""
    core = core_of(adapters=("a", "b"), default="a", adapter_memory=3 * adapters.size, max_num_seqs=6)
    dice = random.Random(0)
    outcomes: dict[str, Outcome] = {}
    meant: dict[str, tuple[str | None, tuple[int, ...]]] = {}
    names, tasks = {"a": "a", "b": "b"}, {}  # what each name and (owner, id) means now
    refused = 0
    for i in range(2000):
        kind = dice.choice(("load", "unload", "task", "task", "task", "name", "name", "base", "abort"))
        request_id, prompt, which = str(i), dice.choice(PROMPTS), dice.choice(list(RANKS))
        if kind == "load":
            name = dice.choice(("x", "y", "z"))
            try:
                core.load_adapter(name, adapters.paths[which], replace=name in names)
                names[name] = which
            except Overloaded:  # all adapters are in use
                refused += 1
        elif kind == "unload" and (others := sorted(names.keys() - {"a", "b"})):
            name = dice.choice(others)
            try:
                core.unload_adapter(name)
                del names[name]
            except Conflict:
                assert any(one not in outcomes or not outcomes[one].finished for one in meant)
        elif kind == "abort" and (open_ := [one for one in meant if not outcomes[one].finished]):
            core.abort(dice.choice(open_))
        elif kind in ("task", "name", "base"):
            outcomes[request_id] = Outcome()
            if kind == "task":
                owner, task_id = dice.choice(("acme", "other")), dice.randrange(4)
                brings = dice.random() < 0.5
                task = named(adapters.tasks[which], task_id) if brings else LoraTask(task_id=task_id)
                core.add(ask(request_id, prompt, lora_task=task, tenant=owner))
                if brings and request_id in core.inflight:  # otherwise it is refused, and the id keeps its old meaning
                    tasks[owner, task_id] = which
                meant[request_id] = tasks.get((owner, task_id)), prompt
            else:
                name = dice.choice(sorted(names)) if kind == "name" else None
                meant[request_id] = None if name is None else names[name], prompt
                core.add(ask(request_id, prompt, adapter=name))
        take(core, outcomes, max_steps=dice.choice((0, 1, 1, 2)))
    take(core, outcomes)
    for request_id, outcome in outcomes.items():
        if outcome.failed is not None:
            assert outcome.failed.message == FULL or "not found in cache" in outcome.failed.message
            refused += 1
        elif outcome.finished[0].reason == "abort":
            continue
        else:
            assert outcome.tokens[0] == adapters.expected[meant[request_id]], request_id
    assert len(outcomes) > 1000
    assert 0 < refused < len(outcomes) // 2
    assert {outcome.failed.kind for outcome in outcomes.values() if outcome.failed} == {"not_found", "overloaded"}
    assert core.request_adapters.num_loads > 100
