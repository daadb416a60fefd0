"""The workloads of the contenders. All is drawn from a seed, so that each contender of a round gets the same, and no
round the same as another: a prefix cache hits only what a workload itself repeats."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

TEXT = (
    "how people in small towns looked after rivers trains bread chess winter bridges maps clocks violins gardens and "
    "salt what a visitor would have noticed first begin with the oldest records then go on in order of time and finish "
    "with the present day what they cost who paid and why it changed when the boats came back past quiet fields"
)
WORDS = TEXT.split()
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in simple words why the sky is blue.",
    "Write a short story about a dog who finds a letter.",
    "List five things to check before a long train journey.",
    "What is the difference between a river and a lake?",
    "Give me a recipe for bread with three ingredients.",
)


class Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request. ``at`` is seconds from the start, 0 in a closed loop; ``text`` is the decoded ``prompt``."""

    id: str
    prompt: tuple[int, ...]
    text: str
    max_tokens: int
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload. ``callers`` in a closed loop; None: requests come at their times, whatever is still running."""

    name: str
    requests: tuple[Request, ...]
    callers: int | None = None


class Writer:
    """A maker of requests of exact lengths, in order, from one seed."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self._tokenizer, self._random, self._seed, self._count = tokenizer, random.Random(seed), seed, 0

    def prompt(self, length: int) -> tuple[int, ...]:
        """Return ``length`` tokens that differ from any other prompt's from the first words on."""
        words = self._random.choices(WORDS, k=length + 8)
        text = " ".join([str(self._random.randrange(10**9)), *words])
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)[:length])

    def request(self, length: int, max_tokens: int, at: float = 0.0, system: tuple[int, ...] = ()) -> Request:
        prompt = system + self.prompt(length)
        self._count += 1
        text = self._tokenizer.decode(list(prompt))
        return Request(id=f"{self._seed}-{self._count}", prompt=prompt, text=text, max_tokens=max_tokens, at=at)

    def lognormal(self, median: float, sigma: float, low: int, high: int) -> int:
        return min(high, max(low, round(median * 2.718281828 ** self._random.gauss(0, sigma))))

    def arrivals(self, count: int, rate: float) -> list[float]:
        """Return a Poisson process: ``count`` times, ``rate`` a second on average, the first at 0."""
        times = [0.0]
        while len(times) < count:
            times.append(times[-1] + self._random.expovariate(rate))
        return times[:count]


def closed_loop(writer: Writer, callers: int, count: int, prompt: int, new: int) -> Workload:
    requests = tuple(writer.request(prompt, new) for _ in range(count))
    return Workload(name=f"{callers} callers", requests=requests, callers=callers)


def long_prompt(writer: Writer, length: int, count: int) -> Workload:
    """Return long prompts one after another, for their times to first token."""
    requests = tuple(writer.request(length, 2) for _ in range(count))
    return Workload(name=f"prompt of {length}", requests=requests, callers=1)


def chat(writer: Writer, at: float = 0.0) -> Request:
    """Return a chat whose lengths are those of collections of shared chats: most are short, a few are very long."""
    return writer.request(writer.lognormal(80, 1.1, 4, 1024), writer.lognormal(90, 0.8, 4, 384), at)


def chats(writer: Writer, count: int, rate: float, name: str = "chats") -> Workload:
    return Workload(name=name, requests=tuple(chat(writer, at) for at in writer.arrivals(count, rate)))


def chats_at_once(writer: Writer, count: int, callers: int) -> Workload:
    """Return chats in a closed loop with some always waiting, for a contender's capacity."""
    return Workload(name="chats at once", requests=tuple(chat(writer) for _ in range(count)), callers=callers)


def shared_prompt(writer: Writer, count: int, rate: float, length: int) -> Workload:
    """Return questions after one system prompt of ``length`` tokens."""
    system = writer.prompt(length)
    requests = tuple(
        writer.request(writer.lognormal(40, 0.5, 8, 128), 64, at, system) for at in writer.arrivals(count, rate)
    )
    return Workload(name="shared prompt", requests=requests)


def bursts(writer: Writer, count: int, size: int, pause: float) -> Workload:
    """Return ``count`` times ``size`` requests at the same moment, ``pause`` seconds apart."""
    requests = tuple(
        writer.request(writer.lognormal(90, 0.4, 16, 256), 64, burst * pause)
        for burst in range(count)
        for _ in range(size)
    )
    return Workload(name="bursts", requests=requests)


def questions(tokenizer: Any, new: int) -> Workload:
    """Return chats whose texts are compared with those of the reference."""
    requests = []
    for number, question in enumerate(QUESTIONS):
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        requests.append(Request(id=f"question-{number}", prompt=ids, text=text, max_tokens=new))
    return Workload(name="texts", requests=tuple(requests), callers=2)


def steady(quick: bool, callers: list[int], new: int) -> list[Callable[[Writer], Workload]]:
    """Return closed loops and long prompts."""
    if quick:
        return [lambda w, n=n: closed_loop(w, n, n, 24, 8) for n in callers] + [lambda w: long_prompt(w, 128, 1)]
    loops = [lambda w, n=n: closed_loop(w, n, max(n, 2), 100, new) for n in callers]
    return [*loops, lambda w: long_prompt(w, 1000, 2), lambda w: long_prompt(w, 4000, 1)]


def traffic(quick: bool, rate: float) -> list[Callable[[Writer], Workload]]:
    """Return open-loop workloads: chats, a shared prompt, and bursts."""
    if quick:
        return [
            lambda w: chats(w, 3, 4 * rate),
            lambda w: shared_prompt(w, 3, 4 * rate, 64),
            lambda w: bursts(w, 2, 2, 0.5),
        ]
    return [
        lambda w: chats(w, 24, rate),
        lambda w: shared_prompt(w, 16, rate, 800),
        lambda w: bursts(w, 3, 8, 4.0),
    ]
