"""The instant engine ends texts where every engine does."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from tiny_models import request_of

from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.interface.request import ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantCore, write_model


def answer(core: InstantCore, request: ValidRequest) -> tuple[list[int], str]:
    tokens: list[int] = []
    core.add(request, None)
    while True:
        for _, _, event in core.step():
            if isinstance(event, Tokens):
                tokens += event.token_ids
            elif isinstance(event, Finished):
                return tokens, event.reason


def test_a_stop_sequence_ends_a_text(tmp_path: Path) -> None:
    """A stop sequence ends a text, also if its first tokens came in an earlier attempt."""
    core = InstantCore(write_model(tmp_path / "model"), EngineSettings())
    free, reason = answer(core, request_of("free", (5, 6), max_tokens=9))
    assert (len(free), reason) == (9, "length")
    run = tuple(free[3:6])
    assert answer(core, request_of("a", (5, 6), max_tokens=9, stop_sequences=(run,))) == (free[:6], "stop")
    resumed = request_of("b", (5, 6), max_tokens=9, stop_sequences=(run,), resumed=free[:4])
    assert answer(core, replace(resumed, request_id="b")) == (free[4:6], "stop")
