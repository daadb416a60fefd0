"""The contender's side: an `Engine` runs the requests of a message, and the times of its tokens are returned.

    {"do": "load", "model": …, "options": …}               → {"versions": …, "servers": …}
    {"do": "run", "callers": …, "limit": …, "requests": …} → {"seconds": …, "cut": …, "answers": …}

A line of JSON each, on what were stdin and stdout when the process began; an error is {"error": …}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """The output of a step for a request: tokens, or text where an engine gives no more; ``num_tokens``: how many."""

    id: str
    tokens: list[int]
    text: str
    over: bool
    num_tokens: int | None = None


class Engine:
    """An engine. ``servers``: its work is done by child processes, so that this one's CPU time is the caller's and not
    counted. ``versions`` are those of the packages that determine its figures."""

    versions: dict[str, str]
    servers = False

    def add(self, request: dict[str, Any]) -> None:
        raise NotImplementedError

    def step(self, wait: float) -> list[Piece]:
        """Compute, or wait up to the given number of seconds for other processes."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop its servers."""


def run(
    engine: Engine,
    requests: list[dict[str, Any]],
    callers: int | None,
    limit: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Run all ``requests``: each at its time, or ``callers`` at once, each of which sends the next when its last has
    ended. Unfinished requests are cut after ``limit`` seconds."""
    start = clock()
    waiting, running = deque(requests), dict[str, dict[str, Any]]()
    answers = []
    while waiting or running:
        now = clock() - start
        if now > limit:
            break
        while waiting and (len(running) < callers if callers else waiting[0]["at"] <= now):
            request = waiting.popleft()
            asked = now if callers else request["at"]
            running[request["id"]] = answer = {
                "id": request["id"],
                "asked": asked,
                "events": [],
                "tokens": [],
                "text": "",
            }
            answers.append(answer)
            engine.add(request)
        due = limit if callers or not waiting else waiting[0]["at"]
        if not running:
            sleep(max(0.0, due - (clock() - start)))
            continue
        for piece in engine.step(max(0.0, min(due - now, 1.0))):
            answer = running[piece.id]
            count = len(piece.tokens) or bool(piece.text) if piece.num_tokens is None else piece.num_tokens
            if count:
                answer["events"].append((round(clock() - start, 6), int(count)))
            answer["tokens"] += piece.tokens
            answer["text"] += piece.text
            if piece.over:
                del running[piece.id]
    return {"seconds": clock() - start, "cut": len(running) + len(waiting), "answers": answers}


def serve(load: Callable[[str, dict[str, Any]], Engine]) -> None:
    """Answer messages until stdin ends, then end this process, whatever threads it has. Output of libraries goes to
    stderr."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any]
        try:
            if message["do"] == "load":
                engine = load(message["model"], message["options"])
                answer = {"versions": engine.versions, "servers": engine.servers}
            else:
                assert engine is not None
                answer = run(engine, message["requests"], message["callers"], message["limit"])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=told, flush=True)
    if engine is not None:
        engine.close()
    os._exit(0)


def versions(*packages: str) -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in packages}
