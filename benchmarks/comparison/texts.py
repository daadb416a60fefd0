"""Greedy texts beside those of transformers' `generate()` in float32."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .figures import same_at_the_beginning
from .protocol import Process
from .workloads import Request

NONSENSE = 1.5  # nats a token less likely than the reference's own text, on average


def compared(
    reference: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]], losses: Mapping[str, float]
) -> dict[str, Any]:
    """Compare texts with the reference's. ``same``: tokens at the beginning that are the reference's, over all texts,
    ``of`` so many. ``losses`` are mean negative log probabilities by the reference: of its own texts under their names,
    of the others' under "their NAME". A text may diverge early and be as good (a tie, rounding); one that the reference
    finds unlikely throughout is not."""
    each = [same_at_the_beginning(reference[name], tokens.get(name, ())) for name in reference]
    own = statistics.mean(losses[name] for name in reference)
    their = statistics.mean(losses.get(f"their {name}", float("inf")) for name in reference)
    return {
        "same": sum(each),
        "of": sum(len(ids) for ids in reference.values()),
        "each": each,
        "loss": None if their == float("inf") else round(their, 3),
        "loss_of_reference": round(own, 3),
        "nonsense": their > own + NONSENSE,
    }


class Reference:
    """The process that generates the reference texts; ``texts`` are its own, by request."""

    def __init__(self, process: Process, requests: Sequence[Request], limit: float) -> None:
        self._process, self._requests, self._limit = process, requests, limit
        asked = [{"id": r.id, "prompt": r.prompt, "max_tokens": r.max_tokens, "at": 0} for r in requests]
        self.texts = {answer["id"]: answer["tokens"] for answer in self._run(asked)}
        self._own = self._losses("", self.texts)

    def _run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        message = {"do": "run", "requests": requests, "callers": 1, "limit": self._limit}
        answers: list[dict[str, Any]] = self._process.ask(message, self._limit + 30)["answers"]
        return answers

    def _losses(self, prefix: str, texts: Mapping[str, Sequence[int]]) -> dict[str, float]:
        asked = [
            {"id": prefix + r.id, "prompt": r.prompt, "tokens": list(texts[r.id]), "at": 0}
            for r in self._requests
            if texts.get(r.id)
        ]
        return {answer["id"]: float(answer["text"]) for answer in self._run(asked)}

    def compare(self, texts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        return compared(self.texts, texts, self._own | self._losses("their ", texts))
