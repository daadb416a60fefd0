"""Adapters in slots: steps over fixed buffers give each row what its adapter gives it alone, whatever came and went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import run
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine import assembly
from mlflow_llm.serving.engine.adapters import lora_slots
from mlflow_llm.serving.engine.adapters.lora_plan import Factors
from mlflow_llm.serving.engine.adapters.lora_slots import AdapterSlots, SlotPlan
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.forward.decode_graphs import GraphedForward
from mlflow_llm.serving.interface.settings import EngineSettings

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEY, WIDTH = ("q", "k"), 40
GROUPS = [(("o",), [(0, 24)]), (KEY, [(0, 24), (24, 34)])]
RANKS = {"narrow": 1, "plain": 16, "widest": lora_slots.MAX_RANK}


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)


def factors_of(name: str, rank: int) -> dict[str, Factors]:
    """Return random factors on k, and for all but "narrow" on q too, there with gain and shift."""
    make = torch.Generator().manual_seed(len(name))

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=make).to(DEVICE)

    q = {"q": Factors(random(rank, WIDTH), random(24, rank), 2.0, random(24), random(24))}
    return {"k": Factors(random(rank, WIDTH), random(10, rank), 0.5), **(q if name != "narrow" else {})}


def adapted(x: torch.Tensor, y: torch.Tensor, own: dict[str, Factors]) -> torch.Tensor:
    """Return a row y with one adapter's part, as the formula has it."""
    out = y.clone()
    for module, (start, end) in zip(*GROUPS[1], strict=True):
        if module in own:
            f = own[module]
            part = out[start:end] + f.scaling * (f.b @ (f.a @ x))
            out[start:end] = part if f.gain is None or f.shift is None else part * f.gain + f.shift
    return out


def test_each_row_gets_its_own_adapter() -> None:
    """Rows of adapters of different ranks and modules, and of the base, get what the formula gives; base rows keep
    their bits, and so does a row alone."""
    factors = {name: factors_of(name, rank) for name, rank in RANKS.items()}
    slots = AdapterSlots(GROUPS, DEVICE, torch.float32)
    names = ["plain", None, "widest", "narrow", "plain"]
    x, y = torch.randn(5, WIDTH, device=DEVICE), torch.randn(5, 34, device=DEVICE)
    plan = SlotPlan(slots, 5)
    plan.rows.copy_(torch.tensor(slots.slots_of(names, factors)))
    found = y.clone()
    plan.add_to(KEY, x, found)
    wanted = torch.stack([adapted(x[i], y[i], factors.get(name or "", {})) for i, name in enumerate(names)])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1], y[1])
    alone, row = SlotPlan(slots, 1), y[2:3].clone()
    alone.rows.copy_(torch.tensor(slots.slots_of(["widest"], factors)))
    alone.add_to(KEY, x[2:3], row)
    assert torch.equal(row, found[2:3])
    unknown = y.clone()
    plan.add_to(("head",), x, unknown)
    assert torch.equal(unknown, y)


def test_adapters_come_and_go_at_fixed_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is freed by removal, or taken from the adapter used longest ago; the tables never move."""
    monkeypatch.setattr(lora_slots, "NUM_SLOTS", 3)
    factors = {name: factors_of(name, rank) for name, rank in RANKS.items()}
    slots = AdapterSlots(GROUPS, DEVICE, torch.float32)
    places = [one.data_ptr() for one in (slots.tables, slots.ranks, slots.scales)]
    assert slots.slots_of(["plain", None, "narrow"], factors) == [1, 0, 2]
    assert slots.slots_of(["plain"], factors) == [1]
    assert slots.slots_of(["widest", "plain"], factors) == [2, 1]
    assert slots.ranks[2].tolist() == [0, lora_slots.MAX_RANK, lora_slots.MAX_RANK]
    slots.remove("plain")
    slots.remove("plain")
    assert slots.slots_of(["narrow", "widest"], factors) == [1, 2]
    assert slots.ranks[1].tolist() == [0, 0, 1]
    assert [one.data_ptr() for one in (slots.tables, slots.ranks, slots.scales)] == places


def save_adapter(folder: Path, model: Any, seed: int, rank: int) -> str:
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"])
    get_peft_model(model, config).save_pretrained(folder)
    return str(folder)


@pytest.mark.usefixtures("_kernels")
def test_an_engine_launches_steps_with_adapters_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of two adapters and the base in one batch are those of plain steps, over fixed buffers and launched ahead,
    also after one adapter was replaced; adapters of too large a rank run by plain steps."""
    monkeypatch.setattr(assembly, "why_not_ahead", lambda forward, settings: "")
    bundle = save_bundle(make_model(FAMILIES["llama"]()), tmp_path / "model")
    paths = [save_adapter(tmp_path / str(i), make_model(FAMILIES["llama"]()), i, rank) for i, rank in ((1, 4), (2, 8))]
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 22, "kv_block_size": 8}
    texts = []
    for graphs in ("none", "auto"):
        core = EngineCore(bundle, EngineSettings(kernels="torch", cuda_graphs=graphs, dtype="float32", **small))
        found = []
        for order in (paths, paths[::-1]):
            for name, path in zip("ab", order, strict=True):
                core.load_adapter(name, path, replace=True)
            asked = [request_of(f"{one}", prompt_of(5, 1), max_tokens=4, adapter=one) for one in ("a", None, "b")]
            outcomes = run(core, *asked)
            found.append([outcomes[f"{one}"].tokens[0] for one in ("a", None, "b")])
        forward: Any = core.parts.runner.step_forward
        if graphs == "auto":
            assert isinstance(forward, GraphedForward)
            assert forward.adapted
            monkeypatch.setattr(lora_slots, "MAX_RANK", 2)
            assert not forward.takes(2, ["a", None])
        core.close()
        texts.append(found)
    assert texts[0] == texts[1]
    assert texts[0][0][0] == texts[0][1][2] != texts[0][0][1]


def test_without_kernels_steps_with_adapters_are_plain() -> None:
    """Without a device, or if the kernel gives something else, no step with adapters is recorded."""
    if DEVICE.type == "cpu":
        assert lora_slots.why_not(DEVICE, torch.float32) == "there is no CUDA device"
