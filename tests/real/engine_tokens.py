"""Tokens of requests run to their ends by an engine core."""

from __future__ import annotations

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.events import Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest


def greedy(name: str, prompt: tuple[int, ...], max_tokens: int, adapter: str | None = None) -> ValidRequest:
    """Return a completions request of one greedy sequence."""
    return ValidRequest(
        request_id=name,
        task="completions",
        model="m",
        sequences=(Sequence(prompt_token_ids=prompt),),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
        adapter=adapter,
    )


def tokens_reported(core: EngineCore, *requests: ValidRequest) -> dict[str, list[int]]:
    """Return the tokens of requests, all run in one batch; ``core`` is closed afterwards."""
    for request in requests:
        core.add(request)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while core.has_work():
        for _, name, event in core.step():
            if isinstance(event, Tokens):
                found[name].extend(event.token_ids)
    core.check_integrity()
    core.close()
    return found
