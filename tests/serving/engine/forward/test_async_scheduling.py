"""Steps launched before the last one's tokens are read: the events that the plain loop gives, whatever comes between.

The CPU runs what a CUDA device would, in the same order; only that nothing overlaps. On a device the tests look at what
it really does. All compute in float32: in bfloat16 torch's products may round a row differently in a step of another
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from engine_runs import TOKEN_BYTES, Outcome, run, take
from tiny_models import greedy, prompt_of, request_of

from mlflow_llm.serving.engine import assembly
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.forward.async_scheduling import AsyncScheduling
from mlflow_llm.serving.engine.sampling import device_sampler, device_sampling, sampler
from mlflow_llm.serving.engine.scheduling.scheduler import ScheduledChunk
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.request import Beams, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

Then = tuple[str, int, Callable[[EngineCore], None]]  # when a request has so many tokens, of all its sequences


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[list[ScheduledChunk]]:
    """Let engines launch ahead on the CPU too; provide the runs of each step launched before the last was read."""
    follow, steps = AsyncScheduling.follow, []

    def spy(self: AsyncScheduling, step: Any) -> Any:
        launched = follow(self, step)
        if launched is not None:
            steps.append(launched.chunks)
        return launched

    monkeypatch.setattr(AsyncScheduling, "follow", spy)
    monkeypatch.setattr(
        assembly, "why_not_ahead", lambda forward, settings: "none" if settings.async_scheduling == "none" else ""
    )
    return steps


def make_core(bundle: Bundle, ahead: bool, **more: Any) -> EngineCore:
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "kv_cache_memory": 1 << 24, "dtype": "float32"}
    on = "auto" if ahead else "none"
    return EngineCore(
        bundle, EngineSettings(**{**small, "kv_block_size": 8, "kernels": "torch", "async_scheduling": on, **more})
    )


def play(core: EngineCore, requests: Sequence[ValidRequest], then: Sequence[Then] = ()) -> dict[str, Outcome]:
    """Run ``requests`` to their ends, checking the accounts after each step, and do each of ``then`` when it is due."""
    outcomes = {request.request_id: Outcome() for request in requests}
    add, waiting = core.add, list(then)

    def note(request: ValidRequest) -> None:
        outcomes.setdefault(request.request_id, Outcome())
        add(request)

    core.add = note  # type: ignore[method-assign, assignment]
    for request in requests:
        core.add(request)
    while core.has_work():
        take(core, outcomes, max_steps=1)
        for one in [one for one in waiting if sum(map(len, outcomes[one[0]].tokens.values())) >= one[1]]:
            waiting.remove(one)
            one[2](core)
            core.check_integrity()
    assert not waiting
    check_account(core, outcomes)
    core.close()
    return outcomes


def check_account(core: EngineCore, outcomes: dict[str, Outcome]) -> None:
    """Check that every generated token was delivered and that no memory is held."""
    assert core.finisher.generated == sum(len(t) for o in outcomes.values() for t in o.tokens.values())
    for outcome in outcomes.values():
        for index, finished in outcome.finished.items():
            assert finished.num_generated_tokens == len(outcome.tokens[index])
    cache = core.parts.cache
    assert not cache.tables
    assert cache.pool.num_available == cache.pool.num_blocks


def texts(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    return {
        name: (dict(one.tokens), {i: f.reason for i, f in sorted(one.finished.items())}, one.failed)
        for name, one in outcomes.items()
    }


def both(
    bundle: Bundle, requests: Sequence[ValidRequest], then: Sequence[Then] = (), **more: Any
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    return tuple(play(make_core(bundle, ahead, **more), requests, then) for ahead in (True, False))  # type: ignore


def mixed() -> list[ValidRequest]:
    """Return greedy and sampled requests of unequal lengths, some with stop conditions."""
    drawn = [{}, {"min_p": 0.05}, {"top_k": 20}, {"top_p": 0.8}, {"typical_p": 0.8}, {"top_k": 9, "top_p": 0.9}]
    requests = [
        request_of(f"drawn-{i}", prompt_of(5 + 4 * i, i), seed=i, temperature=0.9, max_tokens=14 + 3 * i, **p)
        for i, p in enumerate(drawn)
    ]
    requests += [request_of(f"greedy-{i}", prompt_of(9 * i + 3, 40 + i), max_tokens=4 + 9 * i) for i in range(4)]
    requests.append(request_of("choices", prompt_of(19, 60), n=3, temperature=1.1, seed=8, max_tokens=25))
    return requests


def test_texts_are_those_of_the_plain_loop(
    tiny_bundle: Bundle, tiny_llama: Any, followed: list[list[ScheduledChunk]]
) -> None:
    """Every text and end equals the plain loop's, greedy and sampled, with more sequences than slots."""
    ahead, plain = both(tiny_bundle, mixed())
    assert texts(ahead) == texts(plain)
    assert len(followed) > 20
    assert ahead["greedy-3"].tokens[0] == greedy(tiny_llama, prompt_of(30, 43), 31)


class DeviceTokens(torch.Tensor):
    """CPU tokens that claim to be on a device."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def test_tokens_of_a_device_are_copied_once_it_has_them(
    tiny_bundle: Bundle, followed: list[list[ScheduledChunk]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are copied into pinned memory after the step on its stream, and read when the event after the copy has
    occurred, which is waited for only after the following step was launched."""
    done: list[str] = []
    draw, empty, follow = device_sampler.draw_unread, torch.empty, AsyncScheduling.follow

    class Event:
        def record(self, stream: str) -> None:
            done.append(f"event on {stream}")

        def synchronize(self) -> None:
            done.append("wait")

    def pinned(*shape: Any, pin_memory: bool = False, **more: Any) -> Any:
        done.extend(["pinned"] * pin_memory)
        return empty(*shape, **more)

    def noted(self: AsyncScheduling, step: Any) -> Any:
        done.append("follow")
        return follow(self, step)

    plain = play(make_core(tiny_bundle, False, device="cpu"), mixed())
    monkeypatch.setattr(device_sampler, "draw_unread", lambda *given: draw(*given).as_subclass(DeviceTokens))
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(AsyncScheduling, "follow", noted)
    assert texts(play(make_core(tiny_bundle, True, device="cpu"), mixed())) == texts(plain)
    launch = "pinned, event on the stream of cuda"
    assert f"{launch}, follow, {launch}, wait, follow, {launch}, wait" in ", ".join(done)
    assert done.count("wait") == done.count("follow") > 20


def test_a_step_is_launched_before_the_last_is_read(tiny_bundle: Bundle, followed: list[list[ScheduledChunk]]) -> None:
    """Every decode step of a greedy text but the first is launched ahead, and none after its last token."""
    assert run(make_core(tiny_bundle, True), request_of("a", prompt_of(9, 0), max_tokens=12))["a"].finished
    assert [(run.start, run.num_tokens) for runs in followed for run in runs] == [(10 + i, 1) for i in range(10)]


def test_an_end_costs_one_row(tiny_bundle: Bundle, tiny_llama: Any, followed: list[list[ScheduledChunk]]) -> None:
    """A text that ends by a stop token or a stop sequence costs one surplus row, which is not counted; the others
    continue without a pause."""
    stop, through = (greedy(tiny_llama, prompt_of(12, seed), 20) for seed in (1, 2))
    requests = [
        request_of("stop", prompt_of(12, 1), max_tokens=40, stop_token_ids=(stop[5],)),
        request_of("run", prompt_of(12, 2), max_tokens=40, stop_sequences=(tuple(through[7:9]),)),
        request_of("on", prompt_of(12, 3), max_tokens=40),
    ]
    ahead, plain = both(tiny_bundle, requests, max_num_batched_tokens=64)
    assert texts(ahead) == texts(plain)
    assert ahead["stop"].finished[0].reason == ahead["run"].finished[0].reason == "stop"
    lengths = {name: len(one.tokens[0]) for name, one in ahead.items()}
    rows = [run.sequence.request.request_id for runs in followed for run in runs]
    # none follows for the prompt's token and the first that is decoded, nor behind a length that is known
    assert {name: rows.count(name) for name in lengths} == {
        "stop": lengths["stop"] - 1,
        "run": lengths["run"] - 1,
        "on": lengths["on"] - 2,
    }


def test_changes_between_steps_change_no_text(tiny_bundle: Bundle, followed: list[list[ScheduledChunk]]) -> None:
    """Arrivals, an abort, the end of one choice and a reused id while a step is launched change no text."""
    requests = [
        request_of("long", prompt_of(11, 1), max_tokens=60, stream=True),
        request_of("gone", prompt_of(17, 2), max_tokens=60, stream=True),
        request_of("choices", prompt_of(13, 3), n=3, temperature=1.0, seed=5, max_tokens=40, stream=True),
    ]
    late = [request_of(f"late-{i}", prompt_of(20 + i, 7 + i), max_tokens=15, temperature=0.7 * i) for i in range(3)]
    then: list[Then] = [
        ("gone", 10, lambda core: core.abort("gone")),
        ("long", 16, lambda core: [core.add(one) for one in late]),  # type: ignore[func-returns-value, misc]
        ("choices", 36, lambda core: core.finish("choices", 1)),
        ("long", 40, lambda core: core.add(request_of("gone2", prompt_of(17, 2), max_tokens=60))),
    ]
    ahead, plain = both(tiny_bundle, requests, then)
    assert texts(ahead) == texts(plain)
    assert len(ahead["gone"].tokens[0]) == 10
    assert ahead["gone"].finished[0].reason == ahead["choices"].finished[1].reason == "abort"
    assert len(followed) > 40


def test_preemption_loses_and_doubles_nothing(tiny_bundle: Bundle, followed: list[list[ScheduledChunk]]) -> None:
    """With blocks for a fraction of the batch, sequences are preempted between launched steps."""
    requests = [request_of(str(i), prompt_of(20, i), max_tokens=30, temperature=0.6 * (i % 2)) for i in range(5)]
    cores = [make_core(tiny_bundle, ahead, kv_cache_memory=108 * TOKEN_BYTES) for ahead in (True, False)]
    ahead, plain = (play(core, requests) for core in cores)
    assert all(core.parts.scheduler.num_preemptions > 0 for core in cores)
    assert texts(ahead) == texts(plain)
    assert followed


ADJUSTED: list[dict[str, Any]] = [
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.7, "penalize_prompt": True},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"logit_bias": ((5, 2.0), (7, -100.0))},
    {"bad_words": ((7,), (8, 9), (11, 12, 13))},
    {"no_repeat_ngram_size": 2},
    {"min_tokens": 14, "stop_token_ids": tuple(range(60))},
    {"logprobs": 3},
    {"logprobs": 0, "repetition_penalty": 1.2},
]


def test_whatever_changes_or_reports_logits_is_launched_ahead(
    tiny_bundle: Bundle, followed: list[list[ScheduledChunk]]
) -> None:
    """Texts, ends and log probabilities of penalised, biased, restricted and scored sequences, greedy and sampled and
    all in one batch, equal the plain loop's, and every step that can follow is launched ahead."""
    requests = [
        request_of(
            f"{i}-{temperature}", prompt_of(5 + 3 * i, i), max_tokens=40 + i, seed=i, temperature=temperature, **p
        )
        for i, p in enumerate(ADJUSTED)
        for temperature in (0.0, 1.2)
    ]
    requests.append(request_of("choices", prompt_of(9, 3), n=3, seed=4, temperature=0.9, max_tokens=30, **ADJUSTED[2]))
    more = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    ahead, plain = both(tiny_bundle, requests, **more)
    assert texts(ahead) == texts(plain)
    for name, one in ahead.items():
        assert one.logprobs == plain[name].logprobs
    assert sum(len(found) for found in ahead["7-0.0"].logprobs.values()) == 47
    for name in ("0-0.0", "2-1.2", "6-0.0", "7-1.2", "choices"):
        steps = [runs for runs in followed if name in {run.sequence.request.request_id for run in runs}]
        assert len(steps) > 8, name


def test_penalties_survive_whatever_comes_between(tiny_bundle: Bundle, followed: list[list[ScheduledChunk]]) -> None:
    """Penalised texts are those of the plain loop if sequences are preempted, resumed, ended, and others take their
    places."""
    strong = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "no_repeat_ngram_size": 3}
    requests = [
        request_of(str(i), prompt_of(20, i), max_tokens=30, temperature=0.6 * (i % 2), stream=True, **strong)
        for i in range(5)
    ]
    then: list[Then] = [
        ("1", 9, lambda core: core.abort("1")),
        ("0", 12, lambda core: core.add(request_of("late", prompt_of(11, 9), max_tokens=20, **strong))),
    ]
    cores = [make_core(tiny_bundle, ahead, kv_cache_memory=108 * TOKEN_BYTES) for ahead in (True, False)]
    ahead, plain = (play(core, requests, then) for core in cores)
    assert all(core.parts.scheduler.num_preemptions > 0 for core in cores)
    assert texts(ahead) == texts(plain)
    assert followed


def test_what_needs_the_host_is_not_launched_ahead(tiny_bundle: Bundle, followed: list[list[ScheduledChunk]]) -> None:
    """While a sequence has beams or wants its logits, no step is launched ahead."""
    for more in ({"beams": Beams(width=2, length_penalty=1.0)}, {"generation_logits": True}):
        followed.clear()
        requests = [request_of("a", prompt_of(9, 0), **more), request_of("b", prompt_of(9, 1), max_tokens=20)]
        ahead, plain = both(tiny_bundle, requests)
        assert texts(ahead) == texts(plain), more
        assert followed, more
        assert {run.sequence.request.request_id for runs in followed for run in runs} == {"b"}, more


def test_a_row_that_must_be_sorted_is_drawn_when_it_is_read(
    tiny_bundle: Bundle, followed: list[list[ScheduledChunk]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the best candidates do not sum to top_p, the token is drawn on the host: the row launched after it is
    discarded and computed again. Torch sorts so; our kernels search a bound instead."""
    monkeypatch.setattr(device_sampling, "is_offered", lambda device: False)
    monkeypatch.setattr(sampler, "MAX_TRUNCATED_CANDIDATES", 4)
    read = []
    sample = sampler.sample
    monkeypatch.setattr(
        "mlflow_llm.serving.engine.forward.async_scheduling.sample",
        lambda *args: read.append(len(args[1])) or sample(*args),
    )
    penalized = {"repetition_penalty": 1.3, "logprobs": 2}
    requests = [
        request_of("wide", prompt_of(9, 0), temperature=3.0, top_p=0.97, max_tokens=30, seed=3),
        request_of("wide2", prompt_of(9, 5), temperature=3.0, top_p=0.97, max_tokens=30, seed=4, **penalized),
        request_of("b", prompt_of(9, 1), max_tokens=40),
        request_of("narrow", prompt_of(9, 2), temperature=0.3, top_p=0.6, max_tokens=40),
    ]
    ahead, plain = both(tiny_bundle, requests)
    assert texts(ahead) == texts(plain)
    assert ahead["wide2"].logprobs == plain["wide2"].logprobs
    assert len(read) > 10
    assert followed


def test_numbers_that_are_not_finite_fail_one_request(
    tiny_bundle: Bundle, tiny_llama: Any, followed: list[list[ScheduledChunk]]
) -> None:
    """A request that is not finite while a step is launched fails once; later users of its blocks are unaffected."""
    core = make_core(tiny_bundle, True, kv_cache_memory=128 * TOKEN_BYTES)

    def poison(core: EngineCore) -> None:
        cache = core.parts.cache
        bad = next(s for s in core.parts.scheduler.running if s.request.request_id == "bad")
        cache.layers[0].v[cache.blocks_of(bad.id)] = float("nan")

    requests = [
        request_of("bad", prompt_of(10, 0), max_tokens=40, temperature=0.5, stream=True),
        request_of("good", prompt_of(20, 1), max_tokens=40),
    ]
    then: list[Then] = [
        ("bad", 5, poison),
        ("good", 30, lambda core: core.add(request_of("next", prompt_of(50, 4), max_tokens=12))),
    ]
    outcomes = play(core, requests, then)
    assert outcomes["bad"].failed is not None
    assert outcomes["bad"].failed.kind == "internal"
    assert outcomes["good"].tokens[0] == greedy(tiny_llama, prompt_of(20, 1), 40)
    assert outcomes["next"].tokens[0] == greedy(tiny_llama, prompt_of(50, 4), 12)
    assert followed


@pytest.mark.parametrize("at", ["launch", "read"])
def test_a_step_that_fails_is_computed_again(
    at: str, tiny_bundle: Bundle, followed: list[list[ScheduledChunk]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while a step is launched or read fails no request: each sequence is run alone."""
    requests = [request_of(str(i), prompt_of(9 + i, i), max_tokens=20) for i in range(3)]
    plain = play(make_core(tiny_bundle, False), requests)
    name = "_launch" if at == "launch" else "_read"
    original, calls = getattr(AsyncScheduling, name), []

    def fail(self: AsyncScheduling, *args: Any) -> Any:
        calls.append(None)
        if len(calls) in (4, 9):
            raise RuntimeError("an illegal memory access was encountered")
        return original(self, *args)

    monkeypatch.setattr(AsyncScheduling, name, fail)
    assert texts(play(make_core(tiny_bundle, True), requests)) == texts(plain)
    assert len(calls) > 9


def test_provisioned_work_is_planned_as_ever(tiny_bundle: Bundle, followed: list[list[ScheduledChunk]]) -> None:
    """Beside provisioned sequences best-effort ones get the remaining time step by step and are not launched ahead;
    provisioned ones alone are."""
    bought = [request_of(f"p{i}", prompt_of(9 + i, i), max_tokens=30, provisioned=True) for i in range(2)]
    ahead, plain = both(tiny_bundle, [*bought, request_of("free", prompt_of(20, 5), max_tokens=30)])
    assert texts(ahead) == texts(plain)
    for runs in followed:
        assert len({run.sequence.provisioned for run in runs}) == 1
    followed.clear()
    play(make_core(tiny_bundle, True), bought)
    assert len(followed) > 20


def test_a_sequence_within_a_grammar_is_never_launched_ahead(
    tiny_bundle: Bundle, followed: list[list[ScheduledChunk]]
) -> None:
    """A sequence within a grammar is never launched ahead."""
    core = make_core(tiny_bundle, True)
    core.add(request_of("a", prompt_of(9, 0), max_tokens=30))
    outcomes = {"a": Outcome()}
    take(core, outcomes, max_steps=4)
    sequence = core.parts.scheduler.running[0]
    runs = [ScheduledChunk(sequence, sequence.num_computed, 1)]
    assert core.ahead.takes(runs)
    grammar = Grammar(source="", field="regex")
    sequence.sampling = msgspec.structs.replace(sequence.sampling, grammar=grammar)
    assert not core.ahead.takes(runs)
    core.abort("a")
    core.close()


def test_it_is_off_on_cpu(tiny_bundle: Bundle) -> None:
    """On CPU steps are not launched ahead, and the engine's information gives the reason."""
    for setting, reason in (
        ("auto", "decode steps are not captured as CUDA graphs"),
        ("none", "the setting async_scheduling is 'none'"),
    ):
        core = EngineCore(
            tiny_bundle,
            EngineSettings(
                device="cpu", kv_block_size=8, kernels="torch", async_scheduling=setting, kv_cache_memory=1 << 22
            ),
        )
        assert core.info.paged is not None
        assert (core.info.paged.async_scheduling, core.info.paged.async_scheduling_reason) == (False, reason)
        core.close()
