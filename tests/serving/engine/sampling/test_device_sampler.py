"""Draws before the last token is known on the host: the tokens, log probabilities and bits of the host's sampler."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_runs import sequence_of
from tiny_models import request_of

from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.sampling import adjustment, device_sampler, device_sampling, sampler, top_logits
from mlflow_llm.serving.engine.sampling.adjustment import Adjuster
from mlflow_llm.serving.engine.sampling.device_sampler import DeviceSampler, Drawn
from mlflow_llm.serving.engine.sampling.kernel_trial import try_kernels
from mlflow_llm.serving.engine.scheduling.sequence import NO_ALLOWED_TOKEN, Sampled, SequenceState

SIZE = 40
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def random_sequence(rng: random.Random, number: int) -> SequenceState:
    """Return a sequence of few different tokens with a random choice of everything that changes logits."""
    tokens = [rng.randint(0, 9) for _ in range(rng.randint(3, 30))]
    size = rng.randint(1, len(tokens))
    bias = np.random.default_rng(number).normal(size=SIZE).astype("<f4").tobytes()
    words = tuple(tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 4))) for _ in range(rng.choice([0, 0, 8])))
    request = request_of(
        str(number),
        tokens[:size],
        resumed=tuple(tokens[size:]),
        seed=number,
        max_tokens=60,
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 7]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        typical_p=rng.choice([1.0, 1.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
        presence_penalty=rng.choice([0.0, 0.6]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        penalize_prompt=rng.choice([False, True]),
        logit_bias=rng.choice([(), ((3, 1.5), (8, -100.0))]),
        bad_words=words,
        no_repeat_ngram_size=rng.choice([0, 0, 0, 1, 2, 3, 4]),
        embedding_bias=rng.choice([None, None, bias]),
        min_tokens=rng.choice([0, 40]),
        stop_token_ids=(2, 5, SIZE + 3),
        logprobs=rng.choice([None, 0, 3]),
    )
    sequence = sequence_of(request, number)
    sequence.move("running")
    return sequence


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host's sampler compute by torch, as it does on devices."""
    monkeypatch.setattr(sampler.native, "can_draw", lambda logits: False)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_the_host_one_step_later(seed: int) -> None:
    """Each draw, made before the token before it is known to the host, gives the host's token and log probabilities,
    while sequences leave and others come."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    drawer = DeviceSampler()
    sequences = [random_sequence(rng, 100 * seed + i) for i in range(6)]
    held: list[Sampled] = []  # of the step before, which the host has not seen
    last = torch.tensor([int(sequence.tokens[-1]) for sequence in sequences])
    for step in range(25):
        logits = torch.randn(len(sequences), SIZE, generator=generator) * 3
        positions = [sequence.num_tokens + bool(held) for sequence in sequences]
        drawn = drawer.draw(logits, sequences, positions, last)
        for sequence, one in zip(sequences, held, strict=True) if held else ():
            sequence.append(one.token_id)
        held = drawn.sampled()
        assert held == sampler.sample(logits, sequences), step
        last = drawn.tokens.clamp_min(0)
        alive = [i for i, one in enumerate(held) if one.token_id >= 0 and rng.random() > 0.03]
        for i in set(range(len(sequences))) - set(alive):
            sequences[i].move("finished")
        sequences, held, last = [sequences[i] for i in alive], [held[i] for i in alive], last[alive]
        if len(sequences) < 4:  # the step is read before others start
            for sequence, one in zip(sequences, held, strict=True):
                sequence.append(one.token_id)
            sequences += [random_sequence(rng, 100 * seed + 10 + 4 * step + i) for i in range(4)]
            held, last = [], torch.tensor([int(sequence.tokens[-1]) for sequence in sequences])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes the interpreter's numbers that are not finite
@pytest.mark.parametrize("seed", range(3))
def test_kernels_draw_what_the_host_draws(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Kernels draw the host's tokens of several blocks of logits; log probabilities agree to float32's last bits, and a
    row with a number that is not finite has no token."""
    pytest.importorskip("triton")
    monkeypatch.setattr(top_logits, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(device_sampling, "SEARCH_TOKENS", 16)
    monkeypatch.setattr(adjustment, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(sampler.native, "can_draw", lambda logits: False)
    rng = random.Random(seed)
    sequences = [random_sequence(rng, 1000 * seed + i) for i in range(24)]
    logits = torch.randn(24, SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    logits[3, 7], logits[4, 35], logits[5, :], logits[6, 2] = float("nan"), float("inf"), float("-inf"), float("-inf")
    wanted = sampler.sample(logits, sequences)
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    last = torch.tensor([int(sequence.tokens[-1]) for sequence in sequences], device=DEVICE)
    found = DeviceSampler().draw(logits.to(DEVICE), sequences, [one.num_tokens for one in sequences], last)
    sampled = Drawn(found.tokens.cpu(), found.scores).sampled()
    assert [one.token_id for one in sampled] == [one.token_id for one in wanted]
    assert {wanted[i].token_id for i in (3, 4, 5)} == {-1}
    for one, other in zip(sampled, wanted, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None and other.logprob is not None:
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-5)
            assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
            assert [p for _, p in one.logprob.top] == pytest.approx([p for _, p in other.logprob.top], abs=1e-5)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "triton"])
def test_adjusted_logits_have_the_bits_of_the_host(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    """The adjusted logits equal ``sampler.adjust``'s bit for bit by torch, and up to the last bits by the kernel."""
    if kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(triton_support, "enabled", lambda device: True)
        monkeypatch.setattr(adjustment, "BLOCK_TOKENS", 16)
    rng = random.Random(1)
    for turn in range(20):
        sequences = [random_sequence(rng, 10 * turn + i) for i in range(5)]
        logits = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(turn)) * 4
        wanted = logits.clone()
        sampler.adjust(wanted, sequences)
        last = torch.tensor([int(sequence.tokens[-1]) for sequence in sequences], device=DEVICE)
        positions = [sequence.num_tokens for sequence in sequences]
        found = Adjuster().adjust(logits.to(DEVICE), sequences, positions, last).cpu()
        if kernels or DEVICE.type == "cuda":
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found, wanted)


@pytest.mark.usefixtures("plain")
def test_tokens_that_were_not_taken_are_not_counted() -> None:
    """A sequence that is forgotten is counted anew from its own tokens; a number that is no token counts as none."""
    request = request_of("a", [1, 2, 3], repetition_penalty=1.5, frequency_penalty=0.5, max_tokens=20)
    sequence = sequence_of(request)
    sequence.move("running")
    drawer = DeviceSampler()
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(0))
    broken = torch.full((1, SIZE), float("nan"))
    assert drawer.draw(logits, [sequence], [3], torch.tensor([3])).tokens.tolist()[0] >= 0
    assert drawer.draw(broken, [sequence], [4], torch.tensor([3])).tokens.tolist() == [-1]
    drawer.forget([sequence])
    sequence.append(7)
    assert drawer.draw(logits, [sequence], [4], torch.tensor([7])).sampled() == sampler.sample(logits, [sequence])


@pytest.mark.usefixtures("plain")
def test_a_row_without_an_allowed_token_says_so() -> None:
    """If a request forbids every token, its row has ``NO_ALLOWED_TOKEN``, and the other rows their tokens."""
    every = tuple((i,) for i in range(SIZE))
    requests = [request_of("a", [1, 2], bad_words=every), request_of("b", [1, 2], presence_penalty=0.5)]
    sequences = [sequence_of(request, i) for i, request in enumerate(requests)]
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))
    found = DeviceSampler().draw(logits, sequences, [2, 2], torch.tensor([2, 2])).tokens.tolist()
    assert found == [one.token_id for one in sampler.sample(logits, sequences)]
    assert found[0] == NO_ALLOWED_TOKEN


def test_wrong_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The trial at load accepts the kernels; if one of them is wrong, the device samples by torch and the log says
    so."""
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    monkeypatch.setattr(device_sampling, "refused", {})
    try_kernels(5000, torch.float32, DEVICE)
    assert device_sampling.is_offered(DEVICE)
    assert not caplog.messages
    monkeypatch.setattr(device_sampling, "race_limited", lambda logits, *more: logits.argmin(-1))
    try_kernels(5000, torch.float32, DEVICE)
    assert not device_sampling.is_offered(DEVICE)
    assert "tokens are sampled by torch: drawing from the largest logits differs" in caplog.text


def test_parameters_of_a_batch_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a batch's sequences stay the same, what they ask for is not looked up again; a new one is looked at."""
    looked: list[int] = []
    kinds = sampler.kinds_unread
    monkeypatch.setattr(device_sampler, "kinds_unread", lambda *given: looked.append(len(given[0])) or kinds(*given))
    rng, drawer = random.Random(3), DeviceSampler()
    sequences = [random_sequence(rng, i) for i in range(4)]
    logits = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(3))
    for some in (sequences, sequences, sequences[:3], [*sequences[:2], sequences[3]]):
        last = torch.tensor([int(sequence.tokens[-1]) for sequence in some])
        rows = [sequences.index(sequence) for sequence in some]
        drawn = drawer.draw(logits[rows], some, [one.num_tokens for one in some], last, counts=False)
        assert drawn.sampled() == sampler.sample(logits[rows], some)
    assert looked == [4, 3, 3]
