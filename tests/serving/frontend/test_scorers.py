"""Scorers of MLflow's as guardrails: whole texts are judged in a process beside the worker, streams too."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend import invoke
from mlflow_llm.serving.frontend.limits.memory_budget import SMALL_BYTES, MemoryBudget
from mlflow_llm.serving.frontend.scorers import Scorers
from mlflow_llm.serving.frontend.streams.in_flight import ClientGone
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.guardrails import Guardrails, ScorerRule, TextRules
from mlflow_llm.serving.interface.reply import Delta, TextLogprob, piece_size
from mlflow_llm.serving.metering import Ledger, Limits, Price, Store, Usage, UsageFilter
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.modes import PayPerToken
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints

NAMES = "judges:polite, judges:nothing,judges:broken,judges:slow,judges:plain,no_such_module:x"
CHAT: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def scorers() -> Iterator[Scorers]:
    """Return scorers with one process for all tests; the one that is too slow costs a process."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    found = Scorers(NAMES)
    yield found
    found.close()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def serve(make: Callable[..., WorkerState], scorers: Scorers) -> Callable[..., FlaskClient]:
    def client(**rules: TextRules) -> FlaskClient:
        server = make()
        (entity,) = server.endpoints.entities()
        served = ServedEndpoints(dataclasses.replace(entity, guardrails=Guardrails(**rules)))
        return create_app(dataclasses.replace(server, endpoints=served, scorers=scorers)).test_client()

    return client


def by(name: str, **more: Any) -> TextRules:
    return TextRules(scorers=(ScorerRule(scorer=name, **more),))


def test_a_scorer_judges_requests(serve: Callable[..., FlaskClient]) -> None:
    """A request that it lets pass is answered, and one that it blocks is a 400 that names the scorer."""
    client = serve(input=by("judges:polite", timeout=100))
    assert client.post(PATH, json=CHAT).status_code == 200
    refused = client.post(PATH, json=CHAT | {"messages": [{"role": "user", "content": "be rude"}]})
    assert (refused.status_code, "input guardrail 'judges:polite'" in refused.text) == (400, True)


def test_a_scorer_judges_replies(serve: Callable[..., FlaskClient]) -> None:
    """Whole or streamed, a blocked reply has no text and ends with content_filter; another one is as it was."""
    body = CHAT | {"temperature": 0}
    plain = serve().post(PATH, json=body).json["choices"][0]
    assert serve(output=by("judges:polite", timeout=100)).post(PATH, json=body).json["choices"][0] == plain
    client = serve(output=by("judges:nothing", timeout=100))
    whole = client.post(PATH, json=body).json
    assert (whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]) == ("", "content_filter")
    assert whole["usage"]["completion_tokens"] > 0
    lines = client.post(PATH, json=body | {"stream": True}).text.split("\n\n")[:-2]
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert not any(choice["delta"].get("content") for choice in choices)
    assert choices[-1]["finish_reason"] == "content_filter"


@pytest.mark.parametrize("name", ["judges:broken", "judges:plain", "no_such_module:x", "not:allowed"])
def test_a_failure_blocks_or_passes_as_the_rule_says(serve: Callable[..., FlaskClient], name: str) -> None:
    """A request without verdict is a 503, a reply is filtered; with PASS both go on."""
    refused = serve(input=by(name, timeout=100)).post(PATH, json=CHAT)
    assert (refused.status_code, "gave no verdict" in refused.text) == (503, True)
    assert serve(input=by(name, on_error="PASS", timeout=100)).post(PATH, json=CHAT).status_code == 200
    blocked = serve(output=by(name, timeout=100)).post(PATH, json=CHAT).json["choices"][0]
    assert blocked["finish_reason"] == "content_filter"
    passed = serve(output=by(name, on_error="PASS", timeout=100)).post(PATH, json=CHAT).json["choices"][0]
    assert passed["finish_reason"] != "content_filter"


def test_a_scorer_has_a_time_limit(serve: Callable[..., FlaskClient]) -> None:
    """One that does not answer is a failure, and its process gives way to another, which answers again."""
    assert serve(input=by("judges:slow", timeout=0.2)).post(PATH, json=CHAT).status_code == 503
    assert serve(input=by("judges:polite", timeout=100)).post(PATH, json=CHAT).status_code == 200


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_text_waits_for_its_turn_no_longer_than_its_request(
    make: Callable[..., WorkerState], scorers: Scorers, side: str
) -> None:
    """While another text is judged, a request ends as timed out when its own time is over."""
    own = Scorers(NAMES)
    server = make()
    (entity,) = server.endpoints.entities()
    guardrails = Guardrails(**{side: by("judges:polite", on_error="PASS", timeout=100)})
    served = ServedEndpoints(dataclasses.replace(entity, guardrails=guardrails))
    client = create_app(dataclasses.replace(server, endpoints=served, scorers=own)).test_client()
    before = gevent.spawn(own.passes, ScorerRule(scorer="judges:slow", timeout=120), {}, "Hi")
    gevent.sleep(0)  # it has its turn from now on, and never ends
    try:
        answer = client.post(PATH, json=CHAT, headers={"X-Request-Timeout": "0.05"})
        assert answer.status_code == 504
    finally:
        before.kill()
        own.close()


class Judge(Scorers):
    """Scorers without a process that let a text pass unless it has "rude", and know how often they were asked."""

    def __init__(self) -> None:
        super().__init__(NAMES)
        self.asked = 0

    def passes(self, rule: ScorerRule, inputs: Any, text: str, *_: Any) -> bool:
        self.asked += 1
        return "rude" not in text


class Metered:
    """A server with a ledger and without keys, whose scorers are a ``Judge``."""

    def __init__(self, make: Callable[..., WorkerState], root: Path, **rules: TextRules) -> None:
        self.store = Store(f"sqlite:///{root}/ledger.db")
        self.ledger, self.judge = Ledger(self.store, state_dir=root), Judge()
        self.ledger.prices.set("*", Price(input=10**9, cached=10**9, output=10**9))
        made = make(ledger=self.ledger, mode=PayPerToken(self.ledger))
        (entity,) = made.endpoints.entities()
        served = ServedEndpoints(dataclasses.replace(entity, guardrails=Guardrails(**rules)))
        self.server = dataclasses.replace(made, endpoints=served, scorers=self.judge)

    def ask(self, said: str = "Hi", **more: Any) -> Any:
        client = create_app(self.server).test_client()
        answer = client.post(PATH, json=CHAT | {"messages": [{"role": "user", "content": said}]} | more)
        answer.get_data()  # of a stream, which goes on until it is read
        return answer

    def limit(self, **limits: int) -> None:
        for kind, value in limits.items():
            Limits(self.store).set("tenant", "default", kind, value)

    def rows(self) -> list[tuple[str, int, int, int]]:
        """Return status, tokens and cost of each request of the ledger."""
        found = Usage(self.store).rows(UsageFilter())
        return [(row.status, row.prompt_tokens, row.completion_tokens, row.cost) for row in found]

    def used(self) -> dict[str, int | str]:
        account = create_app(self.server).test_client().get("/api/2.0/account").json
        return {one["kind"]: one["used"] for one in account["limits"]}


@pytest.fixture
def metered(make: Callable[..., WorkerState], tmp_path: Path) -> Iterator[Callable[..., Metered]]:
    made: list[Metered] = []

    def build(**rules: TextRules) -> Metered:
        made.append(Metered(make, tmp_path, **rules))
        return made[-1]

    yield build
    for one in made:
        check_integrity(one.store)
        one.ledger.close()
        one.store.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_beyond_its_limit_takes_no_turn(metered: Callable[..., Metered], stream: bool) -> None:
    """Limits are reserved before a scorer is asked: what they refuse is judged by none."""
    place = metered(input=by("judges:polite"), output=by("judges:polite"))
    place.limit(qpm=2)
    answers = [place.ask(stream=stream) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert place.judge.asked == 4  # the requests and the replies of two
    assert [row[0] for row in place.rows()] == ["ok", "ok"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_blocked_request_uses_up_a_query_alone(metered: Callable[..., Metered], stream: bool) -> None:
    """All that was reserved for it is given back: tokens, money and its place among those in flight. It is in the
    ledger as an error without tokens, and counts as a query."""
    place = metered(input=by("judges:polite"))
    place.limit(qpm=9, otpm=8, in_flight=1, budget=10**6)
    for _ in range(3):
        assert place.ask("be rude", stream=stream).status_code == 400
    assert place.used() == {"qpm": 3, "otpm": 0, "in_flight": 0, "budget": "0.00"}
    assert place.rows() == [("error", 0, 0, 0)] * 3
    assert place.ask(stream=stream).status_code == 200
    assert (place.judge.asked, place.used()["qpm"], place.used()["in_flight"]) == (4, 4, 0)


def test_who_has_gone_waits_for_no_turn(
    make: Callable[..., WorkerState], metered: Callable[..., Metered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that goes while another text is judged leaves its place in the queue, and gets back what was reserved;
    the next text has its turn."""
    place = metered(input=by("judges:polite", timeout=100))
    place.limit(in_flight=1, qpm=9)
    own = Scorers(NAMES)
    place.server = dataclasses.replace(place.server, scorers=own)
    waiting: list[Any] = []

    @contextmanager
    def watched(sock: Any, pull: Any) -> Iterator[None]:
        waiting.append(pull)
        yield

    monkeypatch.setattr(invoke, "interrupt_on_disconnect", watched)
    before = gevent.spawn(own.passes, ScorerRule(scorer="judges:slow", timeout=120), {}, "Hi")
    gevent.sleep(0)  # it has its turn from now on, and never ends
    asking = gevent.spawn(place.ask)
    with gevent.Timeout(60):
        while not (waiting and place.used()["in_flight"]):
            gevent.sleep(0.01)
        assert place.ask().status_code == 429
        waiting[0].interrupt(ClientGone())
        asking.join()
    assert place.used() == {"in_flight": 0, "qpm": 1}
    assert [row[0] for row in place.rows()] == ["aborted"]
    before.kill()
    assert place.ask().status_code == 200
    own.close()


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_held_back_counts_as_memory(metered: Callable[..., Metered], stream: bool) -> None:
    """A reply that is judged counts as it grows, and no longer than its request; with no room for it the request is
    refused by name, and what was generated until then is billed."""
    place = metered(output=by("judges:polite"))
    body = {"stream": stream, "max_tokens": 2000, "ignore_eos": True}
    counted: list[int] = []
    for by_caller, total in ((2**30, 2**30), (2 * SMALL_BYTES, 2**30), (2**30, 2 * SMALL_BYTES)):
        memory = MemoryBudget(total=total, by_caller=by_caller)
        add = memory.add
        memory.add = lambda *given: (add(*given), counted.append(memory.used))  # noqa: B023
        place.server = dataclasses.replace(place.server, memory=memory)
        answer = place.ask(**body)
        text = answer.get_data(as_text=True)
        if min(by_caller, total) == 2**30:
            assert (answer.status_code, "length" in text) == (200, True)
            assert max(counted) > 2000 * 50  # an object for each token, besides its text
        else:
            assert (answer.status_code, "reply: " in text) == (429 if by_caller < total else 503, True)
        assert (memory.used, memory.used_by) == (0, {})
    ok, *refused = place.rows()
    assert ok[::2] == ("ok", 2000)
    assert all(status == "error" and 0 < tokens < 2000 for status, _, tokens, _ in refused)


def test_inputs_of_scorers_count_as_memory(metered: Callable[..., Metered]) -> None:
    """The texts of a request that scorers are told of count until it ends, since its body no longer does."""
    place = metered(output=by("judges:polite"))
    long = "a " * SMALL_BYTES
    (entity,) = place.server.endpoints.entities()
    place.server = dataclasses.replace(place.server, memory=MemoryBudget(total=2**30, by_caller=2 * len(long)))
    assert place.ask(long).status_code == 429
    assert place.server.memory.used == 0
    open_to_all = ServedEndpoints(dataclasses.replace(entity, guardrails=Guardrails()))
    place.server = dataclasses.replace(place.server, endpoints=open_to_all)
    assert place.ask(long).status_code != 429


def test_the_size_of_pieces_is_what_they_take() -> None:
    """A piece's bytes are counted about as the interpreter allocates them."""

    def made(number: int) -> Delta:
        top = tuple(
            TextLogprob(token=f"t{number}{i}", bytes=(97, 98), token_id=10**6 + number, logprob=-0.5 * i)
            for i in range(number % 3)
        )
        entry = TextLogprob(token=f"w{number}", bytes=(97,), token_id=10**6 + number, logprob=-0.25, top=top)
        return Delta(
            index=0,
            text=f"word {number}" if number % 2 else f"wört\u4e00 {number}",
            token_ids=(10**6 + number,),
            num_tokens=1,
            logprobs=(entry,) if number % 5 == 0 else (),
        )

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        held = [made(number) for number in range(1000)]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 * taken < sum(map(piece_size, held)) < 1.5 * taken
