"""A request that ends every engine it meets is refused for good: a client that sent it again would end them again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from instant_model import ALPHABET, write_instant_model
from server_calls import BODY, ask, asking, engine_pid, idle, until
from serving_process import Running, running

POISON = "~"
WHOLE = BODY | {"max_tokens": 300}
HEALTHY_LIFE = 3.0  # seconds, after which the next engine is started at once


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server of one worker whose engine takes 5 ms a step and dies in the step that reads a tilde."""
    root = tmp_path_factory.mktemp("fragile")
    bundle = write_instant_model(root, step_delay=0.005, poison_token_id=ALPHABET.index(POISON))
    with running(bundle) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "stream"), [("/v1/chat/completions", False), ("/serving-endpoints/assistant/invocations", True)]
)
def test_a_poison_request_gets_a_422(fragile: Running, path: str, stream: bool) -> None:
    """A poison request is a 422 with the reason and without Retry-After, whole or streamed; concurrent requests are
    completed.
    """
    until(lambda: idle(fragile))
    expected = json.loads(ask(fragile, WHOLE)[1])["choices"]
    time.sleep(HEALTHY_LIFE)
    pid = engine_pid(fragile)
    body = BODY | {"messages": [{"role": "user", "content": POISON}], "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, fragile, WHOLE)
        with asking(fragile, body, path) as answer:
            refused, headers = json.loads(answer.read()), answer.headers
            assert answer.status == 422
        assert json.loads(beside.result()[1])["choices"] == expected
    assert "Retry-After" not in headers
    if "v1" in path:
        assert refused["error"]["code"] == "ends_engines"
        refused = refused["error"]
    else:
        assert refused["error_code"] == "INVALID_PARAMETER_VALUE"
    assert "died 4 times in a row on this request" in refused["message"]
    until(lambda: idle(fragile))
    assert engine_pid(fragile) != pid
