"""Device sampling in Triton: numpy's random bits, bit for bit, and the tokens that the CPU draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_runs import sequence_of
from tiny_models import prompt_of, request_of

from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.sampling import device_sampling, randomness, sampler, top_logits
from mlflow_llm.serving.interface.request import Sampling

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
bits = pytest.importorskip("mlflow_llm.serving.engine.sampling.device_sampling_kernel").bits
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEEDS = [0, 1, (1 << 64) - 1, 0x0123456789ABCDEF]
POSITIONS = [0, (1 << 32) - 1, 7, 4096]
SIZE = 1500  # two programs, the second not full


@triton.jit
def store(keys: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    token = tl.arange(0, SIZE)
    seed = tl.load(keys).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 1).to(tl.uint64, bitcast=True)
    tl.store(out + token, bits(seed, position, token).to(tl.int64))


def test_bits_are_numpys() -> None:
    """Every token's 32 bits are those of numpy's Philox, for seeds and positions at their ends."""
    for seed, position in zip(SEEDS, POSITIONS, strict=True):
        found = torch.zeros(64, dtype=torch.int64, device=DEVICE)
        store[(1,)](device_sampling.sampling_keys([seed], [position], DEVICE), found, SIZE=64)
        generator = np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
        assert found.tolist() == generator.random_raw(32).view(np.uint32).tolist()


def test_times_equal_those_of_the_cpu() -> None:
    """Times agree with the CPU's to float32's last bits, also the smallest, which win races."""
    found = device_sampling.exponentials(SEEDS, POSITIONS, SIZE, DEVICE).cpu()
    wanted = randomness.exponentials(SEEDS, POSITIONS, SIZE)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    "more",
    [{}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 40}, {"typical_p": 0.8}],
    ids=["whole", "min_p", "top", "typical"],
)
def test_winners_equal_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, more: dict[str, float]) -> None:
    """Rows with their own temperatures and seeds draw the tokens that they draw on CPU."""
    logits = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(5)) * 3
    requests = [request_of("r", prompt_of(4 + i, i), temperature=0.5 + i / 4, seed=99 + i, **more) for i in range(6)]
    places = [sequence_of(request) for request in requests]
    monkeypatch.setattr(sampler.native, "can_draw", lambda logits: False)
    wanted = sampler.choose(logits, places)
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    assert sampler.choose(logits.to(DEVICE), places) == wanted


@pytest.mark.parametrize("seed", range(4))
def test_bounds_keep_what_a_sort_keeps(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Rows between searched bounds draw what sorted rows draw, for any top_p, min_p and typical_p, narrow and
    flat distributions, and large logits."""
    monkeypatch.setattr(device_sampling, "TILE_TOKENS", 128)
    rng = np.random.default_rng(seed)
    rows, size = 10, 300
    sharpness = torch.from_numpy(rng.choice([0.1, 1.0, 4.0, 20.0], (rows, 1))).float()
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * sharpness
    parameters = [
        Sampling(
            max_tokens=1,
            temperature=float(rng.uniform(0.3, 2.0)),
            top_p=float(rng.choice([1.0, 0.05, 0.5, 0.95])),
            min_p=float(rng.choice([0.0, 0.02])),
            typical_p=float(rng.choice([1.0, 0.2, 0.9])),
        )
        for _ in range(rows)
    ]
    seeds, positions = [100 * seed + i for i in range(rows)], [7 + i for i in range(rows)]
    scaled = logits / torch.tensor([[p.temperature] for p in parameters])
    weights, order = sampler.typical(scaled, parameters)
    times = randomness.exponentials(seeds, positions, size).gather(1, order)
    wanted = order.gather(1, sampler.race(weights, times)[:, None])[:, 0]
    device = logits.to(DEVICE)
    found = device_sampling.race(device, device.amax(-1), parameters, seeds, positions)
    assert found.tolist() == wanted.tolist()


def stable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest of each row and their tokens, the first of equals before."""
    values, ids = torch.sort(logits, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


@pytest.mark.parametrize(("size", "count"), [(9000, 64), (5000, 50), (100, 5), (64, 64), (3, 2)])
def test_the_largest_logits_are_those_of_a_sort(size: int, count: int) -> None:
    """The largest of a row are found in order, also of many equals, and where more than is sorted is in few parts."""
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(size)) * 3
    logits[1, 20 : min(size // 2, 900)] += 30
    logits[2] = logits[2].round()
    found = top_logits.top_logits(logits.to(DEVICE), count)
    values, ids = stable(logits, count)
    assert found.values.tolist() == values.tolist()
    assert found.ids.tolist() == ids.tolist()
    torch.testing.assert_close(found.totals.cpu(), torch.logsumexp(logits, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes the interpreter's numbers that are not finite
def test_the_largest_logits_of_rows_that_are_not_finite() -> None:
    """A row with a number that is none, with infinity, or with nothing finite has no sum, and tokens of the row; one
    with few finite logits has these first."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[0, 5], logits[1, 7], logits[2:] = float("nan"), float("inf"), float("-inf")
    logits[3, [9, 4]] = 1.0
    found = top_logits.top_logits(logits.to(DEVICE), 5)
    assert found.totals.isnan().tolist() == [True, True, True, False]
    assert ((found.ids >= 0) & (found.ids < 300)).all()
    assert (found.ids[3, :2].tolist(), found.values[3].tolist()) == ([4, 9], [1.0, 1.0, *[float("-inf")] * 3])


@pytest.mark.parametrize(("parts", "digits", "searched"), [(8, 8, 1024), (16, 6, 256)])
def test_a_nucleus_is_found_by_programs_together(
    monkeypatch: pytest.MonkeyPatch, parts: int, digits: int, searched: int
) -> None:
    """The sums of several programs find which tokens a row keeps, whatever the digits; others keep all."""
    monkeypatch.setattr(device_sampling, "PARTS", parts)
    monkeypatch.setattr(device_sampling, "DIGITS", digits)
    monkeypatch.setattr(device_sampling, "SEARCH_TOKENS", searched)
    logits = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(3)) * 3
    limits = [(0.5, np.inf, 1.0), (0.9, np.inf, 0.6), (1.0, np.inf, 1.0), (0.95, 1.0, 1.0)]
    scales = torch.ones(4, device=DEVICE)
    floors, ceilings = device_sampling.kept(logits.to(DEVICE), logits.amax(-1).to(DEVICE), scales, limits)
    places = logits.to(DEVICE)
    kept = ((places >= floors[:, None]) & (places <= ceilings[:, None])).cpu()
    for row, (top_p, nearest, typical_p) in enumerate(limits):
        one = Sampling(max_tokens=1, temperature=1.0, top_p=top_p, min_p=float(np.exp(-nearest)), typical_p=typical_p)
        weights, ids = sampler.typical(logits[row : row + 1], [one])
        wanted = torch.zeros(SIZE, dtype=torch.bool).index_fill_(0, ids[0][weights[0] > 0], True)
        assert kept[row].equal(wanted), row
