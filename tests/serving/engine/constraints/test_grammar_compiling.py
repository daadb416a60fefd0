"""Grammar compilation beside the engine's steps: a request that waits for its grammar delays no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from engine_runs import Outcome, run, take, wait_for_work
from grammar_runs import Texts, bundle_of, lark, regex, schema
from tiny_models import FAMILIES, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.constraints import grammar_tokenizer, grammars
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.events import Failed
from mlflow_llm.serving.interface.request import Beams, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantCore, write_model

SETTINGS = EngineSettings(kv_cache_memory=1 << 24)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of("byte_level", tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def core(bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(bundle, SETTINGS)
    yield core
    core.check_integrity()
    core.close()


@pytest.fixture
def prompt(bundle: Bundle) -> tuple[int, ...]:
    return Texts(bundle).ids("the quick brown fox")


class Slow:
    """A compiler that blocks until released: ``begun`` counts starts, ``release`` lets this and later ones finish."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.begun = threading.Semaphore(0)
        self.release = threading.Event()
        self._compile = grammars.compile_grammar

    def __call__(self, source: str, tokenizer: Any) -> Any:
        self.sources.append(source)
        self.begun.release()
        if "slow" in source:
            assert self.release.wait(120)
        return self._compile(source, tokenizer)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow()
    monkeypatch.setattr(grammars, "compile_grammar", slow)
    yield slow
    slow.release.set()


def held(request_id: str, prompt: tuple[int, ...], grammar: Grammar, **more: Any) -> ValidRequest:
    return request_of(request_id, prompt, grammar=grammar, **{"max_tokens": 40, "stop_token_ids": (2,), **more})


def add(core: EngineCore, *requests: ValidRequest) -> dict[str, Outcome]:
    for request in requests:
        core.add(request)
    return {request.request_id: Outcome() for request in requests}


def finish(core: EngineCore, outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Step while there is work, without waiting for grammars."""
    while core.has_work():
        take(core, outcomes, 1)
    return outcomes


def test_a_compile_delays_nobody(core: EngineCore, prompt: tuple[int, ...], slow: Slow) -> None:
    """While a grammar is compiled, requests before and after it run to their ends; then its own runs."""
    outcomes = add(
        core,
        request_of("before", prompt),
        held("waits", prompt, regex("slow|no"), provisioned=True, n=2),
        request_of("after", prompt),
    )
    assert slow.begun.acquire(timeout=240)
    outcomes |= add(core, request_of("later", prompt))
    finish(core, outcomes)
    assert {name for name, outcome in outcomes.items() if outcome.finished} == {"before", "after", "later"}
    assert core.waits
    assert not core.has_work()
    assert core.parts.scheduler.waiting_for() == {"grammar": 2}
    health = core.health()
    assert (health.num_running, health.num_waiting) == (0, 0)  # else it would look stalled
    slow.release.set()
    wait_for_work(core)
    finish(core, outcomes)
    assert [one.reason for one in outcomes["waits"].finished.values()] == ["stop", "stop"]


def test_a_provisioned_request_that_waits_for_its_grammar_takes_no_time_from_best_effort(
    core: EngineCore, prompt: tuple[int, ...], slow: Slow
) -> None:
    """A provisioned request that waits for its grammar has no steps, so best-effort requests run at full speed."""
    add(core, held("waits", prompt, regex("slow"), provisioned=True))
    assert slow.begun.acquire(timeout=240)
    assert not core.parts.scheduler.has_provisioned
    outcomes = add(core, *(request_of(f"r{i}", prompt_of(9, i), max_tokens=4) for i in range(4)))
    take(core, outcomes, 1)
    assert core.health().num_running == 4


def test_provisioned_and_best_effort_with_grammars(core: EngineCore, prompt: tuple[int, ...], bundle: Bundle) -> None:
    """Both classes of requests have the texts beside each other that they have alone."""
    turns = regex("([abc]{3} the dog ){3}")
    requests = [held(f"r{i}", prompt, turns, provisioned=i % 2 == 0, seed=i, temperature=1.0) for i in range(6)]
    alone = {request.request_id: run(core, request)[request.request_id].tokens for request in requests}
    assert {name: found.tokens for name, found in run(core, *requests).items()} == alone


def test_compiled_once(core: EngineCore, prompt: tuple[int, ...], slow: Slow) -> None:
    """Requests that ask for the same grammar share its compiling, at the same time and later."""
    same, again = regex("slow|no"), regex("slow|no")
    outcomes = add(core, held("a", prompt, same), held("b", prompt, again), held("other", prompt, regex("yes")))
    slow.release.set()
    take(core, outcomes)
    run(core, held("later", prompt, same))
    assert slow.sources == [same.source, regex("yes").source]
    assert all(outcome.finished for outcome in outcomes.values())


def test_kept_grammars_are_bounded(
    core: EngineCore, prompt: tuple[int, ...], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used grammar is evicted when there are too many."""
    monkeypatch.setattr(grammars, "MAX_CACHED_GRAMMARS", 2)
    for expression in ("a", "b", "a", "c", "a", "b"):
        run(core, held("r", prompt, regex(expression)))
    assert slow.sources == [regex(expression).source for expression in ("a", "b", "c", "b")]


def test_a_search_that_is_aborted_while_it_waits(core: EngineCore, prompt: tuple[int, ...], slow: Slow) -> None:
    """A search aborted while it waits for its grammar leaves nothing behind, and requests beside it continue."""
    outcomes = add(core, held("slow", prompt, regex("slow"), beams=Beams(width=2)), request_of("b", prompt))
    assert slow.begun.acquire(timeout=240)
    core.abort("slow")
    assert core.has_work()
    finish(core, outcomes)
    assert not core.waits
    assert (outcomes["slow"].finished[0].reason, outcomes["b"].finished[0].reason) == ("abort", "length")


def test_aborted_while_it_waits(core: EngineCore, prompt: tuple[int, ...], slow: Slow) -> None:
    """A request or a single choice aborted while it waits ends at once; a grammar nobody waits for is not compiled."""
    outcomes = add(core, held("slow", prompt, regex("slow")), held("queued", prompt, regex("no")))
    outcomes |= add(core, held("half", prompt, regex("yes"), n=2))
    assert slow.begun.acquire(timeout=240)
    core.abort("slow")
    core.abort("queued")
    core.finish("half", 0)
    finish(core, outcomes)
    ends = [outcomes[name].finished[0].reason for name in ("slow", "queued", "half")]
    assert ends == ["abort"] * 3
    core.check_integrity()
    slow.release.set()
    wait_for_work(core)
    finish(core, outcomes)
    assert outcomes["half"].finished[1].reason == "stop"
    assert slow.sources == [regex("slow").source, regex("yes").source]


def test_done_before_the_request_waits(
    core: EngineCore, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that is done while its request is still being added begins the request once, or fails it."""
    ask, begun = core.grammars.ask, []

    def ask_and_wait(request_id: str, grammar: Grammar) -> Any:
        compilation, event = ask(request_id, grammar), threading.Event()
        for _ in range(2400):
            if compilation.is_done:
                return compilation
            event.wait(0.1)
        raise AssertionError("the grammar was not compiled")

    begin = core.begin
    monkeypatch.setattr(core.grammars, "ask", ask_and_wait)
    monkeypatch.setattr(core, "begin", lambda inflight: (begun.append(inflight.request.request_id), begin(inflight)))
    outcomes = finish(core, add(core, held("good", prompt, regex("[ab]{3}")), held("bad", prompt, regex("("))))
    assert begun == ["good"]
    assert [one.reason for one in outcomes["good"].finished.values()] == ["stop"]
    assert outcomes["bad"].failed is not None


def test_refused_when_nobody_waits_any_more(core: EngineCore, prompt: tuple[int, ...], slow: Slow) -> None:
    """A grammar found invalid after its request was aborted is refused to the next request for it."""
    bad = regex("(slow")
    outcomes = add(core, held("aborted", prompt, bad))
    assert slow.begun.acquire(timeout=240)
    core.abort("aborted")
    finish(core, outcomes)
    slow.release.set()
    run(core, held("after it", prompt, regex("yes")))
    failed = run(core, held("next", prompt, bad))["next"].failed
    assert failed is not None
    assert failed.kind == "invalid_field"


def test_the_deadline_counts_while_it_waits(core: EngineCore, prompt: tuple[int, ...], slow: Slow) -> None:
    """A request past its deadline ends although its grammar is not compiled."""
    late = held("late", prompt, regex("slow"), deadline=time.monotonic())
    outcomes = add(core, late)
    assert core.has_work()
    finish(core, outcomes)
    assert outcomes["late"].finished[0].reason == "deadline"


def test_a_grammar_that_takes_too_long(
    core: EngineCore, prompt: tuple[int, ...], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that compiles too long is refused by the field's name, and those behind it are compiled by another
    thread; the number of abandoned threads is bounded."""
    monkeypatch.setattr(grammars, "TIME_LIMIT", -1.0)
    monkeypatch.setattr(grammars, "MAX_GIVEN_UP", 2)
    for expression in ("slow", "slow 2"):
        outcomes = add(core, held("r", prompt, regex(expression)))
        assert slow.begun.acquire(timeout=240)
        assert core.has_work()
        finish(core, outcomes)
        failed = outcomes["r"].failed
        assert failed is not None
        assert (failed.kind, failed.param) == ("invalid_field", "guided_regex")
        assert "within" in failed.message
    refused = finish(core, add(core, held("r", prompt, regex("slow 3"))))["r"].failed
    assert refused is not None
    assert refused.kind == "overloaded"
    left = list(core.grammars.given_up)
    slow.release.set()
    for thread in left:
        thread.join(240)
    monkeypatch.setattr(grammars, "TIME_LIMIT", 60.0)
    assert run(core, held("r", prompt, regex("yes")))["r"].finished[0].reason == "stop"


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("("), "unclosed group"),
        (lark("start: nothing"), "unknown name"),
        (schema({"type": "colour"}), "colour"),
        (schema({"type": "object", "uniqueItems": 3}), "uniqueItems"),
        (regex("(?=a)b"), "look-around"),
        (Grammar(source="no grammar", field="f"), "Expected token"),
        (Grammar(source="", field="f"), ""),
        (Grammar(source="{", field="f"), "EOF"),
        (regex("a" * grammars.MAX_SOURCE), "characters"),
        (lark('start: "a"\n' * (grammars.MAX_LINES + 1)), "lines"),
    ],
)
def test_a_grammar_that_cannot_be_used(core: EngineCore, prompt: tuple[int, ...], grammar: Grammar, why: str) -> None:
    """An invalid grammar is refused by the field's name with llguidance's reason on one line; plain requests beside it
    run."""
    found = run(core, held("bad", prompt, grammar), request_of("good", prompt))
    failed = found["bad"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == ("invalid_field", grammar.field)
    assert why in failed.message
    assert "\n" not in failed.message
    assert len(failed.message) < 600
    assert found["good"].finished[0].reason == "length"


def test_deep_grammars_do_not_crash_the_engine(core: EngineCore, prompt: tuple[int, ...]) -> None:
    """Deeply nested rules are compiled or refused, and the process survives."""
    depth = grammars.MAX_LINES - 2
    rules = "\n".join(f'r{i}: r{i + 1} | "a"' for i in range(depth - 1))
    definitions = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(4000)}
    definitions["d4000"] = {"type": "object"}
    nested = {"$ref": "#/$defs/d0", "$defs": definitions}
    found = run(
        core,
        held("rules", prompt, lark(f'start: r0\n{rules}\nr{depth - 1}: "b"')),
        held("definitions", prompt, schema(nested), max_tokens=5),
        held("good", prompt, regex("yes")),
    )
    assert found["good"].finished[0].reason == "stop"


def test_a_matcher_that_fails_ends_its_request_alone(
    core: EngineCore, prompt: tuple[int, ...], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar matcher that fails in the middle of a text fails its own request; the next request compiles the grammar
    anew."""
    source = "[ab]{30}"
    outcomes = add(core, held("fails", prompt, regex(source)), held("good", prompt, regex("[cd]{30}")))
    wait_for_work(core)
    take(core, outcomes, 3)
    failing = core.inflight.get("fails")
    assert failing is not None
    grammar_state = failing.unfinished[0].grammar_state
    assert grammar_state is not None
    grammar_state.matcher.consume_token(len(prompt))  # as if one were sampled that is not allowed
    take(core, outcomes)
    failed = outcomes["fails"].failed
    assert failed is not None
    assert failed.kind == "internal"
    assert "grammar" in failed.message
    assert outcomes["good"].finished[0].reason == "stop"
    run(core, held("again", prompt, regex(source)))
    assert slow.sources.count(regex(source).source) == 2


def test_plain_requests_read_no_tokenizer(
    core: EngineCore, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the start nor a plain request reads the tokenizer or starts a thread."""

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("read")

    monkeypatch.setattr(grammar_tokenizer, "load", forbidden)
    run(core, request_of("plain", prompt))
    assert core.grammars.compiler.thread is None
    assert core.masks.pool is None


def test_a_tokenizer_that_cannot_be_used(bundle: Bundle, prompt: tuple[int, ...]) -> None:
    """If the tokenizer cannot be read for grammars, requests with a grammar are refused with the reason."""
    core = EngineCore(msgspec.structs.replace(bundle, tokenizer_dir="/nowhere"), SETTINGS)
    found = run(core, held("r", prompt, regex("yes")), request_of("plain", prompt))
    assert found["r"].failed is not None
    assert found["r"].failed.kind == "invalid_field"
    assert "tokenizer" in found["r"].failed.message
    assert found["plain"].finished[0].reason == "length"
    core.close()


def test_an_engine_without_a_tokenizer(tmp_path: Any, prompt: tuple[int, ...]) -> None:
    """An engine without a tokenizer reports no structured output and refuses such a request by the field's name."""
    core = EngineCore(save_bundle(make_model(FAMILIES["llama"]()), tmp_path), SETTINGS)
    assert not core.info.capabilities.structured_output
    failed = run(core, held("r", (5, 6), regex("yes")))["r"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == ("invalid_field", "guided_regex")
    assert "no structured output" in failed.message
    core.close()


def test_closed_while_a_grammar_is_compiled(bundle: Bundle, prompt: tuple[int, ...], slow: Slow) -> None:
    """Closing does not wait for a compilation, and fails the requests that wait for one."""
    core = EngineCore(bundle, SETTINGS)
    add(core, held("r", prompt, regex("slow")))
    assert slow.begun.acquire(timeout=240)
    events = [event for *_, event in core.close()]
    assert [getattr(event, "kind", None) for event in events] == ["shutting_down"]
    core.check_integrity()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (lark('start: "ab" /[^\\u0000-\\U0010FFFF]/'), "leads to a complete text"),
        (regex("(.*[a-f].{18})|(.*[b-g].{20}x)"), "simpler"),
    ],
)
def test_a_grammar_that_leads_nowhere(
    core: EngineCore, prompt: tuple[int, ...], grammar: Grammar, why: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A grammar with a dead end, or whose matching takes too much in the middle of a text, is the caller's error: its
    request is refused by the field, with the actual numbers, and those beside it continue."""
    monkeypatch.setitem(grammars.LIMITS, "step_lexer_fuel", 1000)
    asked = [held(f"r{seed}", prompt, grammar, seed=10 * seed, temperature=2.0, n=1 + seed % 3) for seed in range(5)]
    found = run(core, *asked, held("good", prompt, regex("yes")))
    for one in asked:
        failed = found[one.request_id].failed
        assert failed is not None
        assert (failed.kind, failed.param) == ("invalid_field", grammar.field)
        assert why in failed.message
    assert found["good"].finished[0].reason == "stop"
    assert "a step of" not in caplog.text


def test_the_instant_engine_holds_nothing_to_a_grammar(tmp_path: Any) -> None:
    """An engine without structured output reports so and refuses a grammar by its field."""
    core = InstantCore(write_model(tmp_path), EngineSettings())
    assert not core.info.capabilities.structured_output
    core.add(held("r", (5, 6), regex("yes")), "client")
    ((_, _, failed),) = core.step()
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.param) == ("invalid_field", "guided_regex")


def test_a_request_waits_before_its_grammar_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that the compiling thread takes at once already has its request waiting, so it is compiled."""
    asked = grammars.Grammars(lambda: pytest.fail("nothing is compiled here"), lambda: None)
    seen: list[list[str]] = []
    monkeypatch.setattr(asked.compiler, "put", lambda compilation: seen.append(list(compilation.waiting)))
    asked.ask("a", Grammar(source='start: "a"', field="f"))
    assert seen == [["a"]]
    asked.close()
