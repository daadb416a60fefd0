"""Requests made from the whole OpenAPI document, sent to a real server: gunicorn, controller process, store and engine
process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from instant_model import write_instant_model
from serving_process import running
from stores import empty_store

from mlflow_llm.serving.frontend.invoke import TIMEOUT_HEADER

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("schemathesis")
    import described
    import requests
    from hypothesis import HealthCheck, settings

# Routes that get examples alone, not each field's bounds: their bodies other routes have too, or test_management and
# test_accounts try them without a server around.
LESS = (
    "^/(invocations|endpoints/{name}/invocations|serving-endpoints/(chat/completions|completions|embeddings)"
    "|score|v[12]/rerank|v1/messages/count_tokens|v1/responses/input_tokens|v3/embeddings)$"
    "|^/v2/models/{name}/versions/"
    "|^/api/2.0/(serving-endpoints|keys|limits|prices|currency|audit)"
)
SMALLEST = "5e-324"  # seconds: what schemathesis takes for "above 0"
tried = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(params=described.operations(without=LESS))
def with_bounds(request: pytest.FixtureRequest) -> Any:
    return described.described(request.param)


@pytest.fixture(params=described.operations(of=LESS))
def examples_alone(request: pytest.FixtureRequest) -> Any:
    return described.described(request.param, coverage=False)


@pytest.fixture(scope="module")
def send(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return ``send(case)``, which gets the answer of a server with a store and a short context, so that no request
    takes long.
    """
    root = tmp_path_factory.mktemp("described")
    bundle = write_instant_model(root / "model", max_model_len=64)
    with pytest.MonkeyPatch.context() as patch, requests.Session() as session:
        patch.setenv("MLFLOW_TRACKING_URI", empty_store(root))  # made already: no question of prompts waits for that
        with running(bundle, database=f"sqlite:///{root / 'store.db'}") as server:
            yield lambda case: reachable(case).call(base_url=server.url, session=session, timeout=240)
            assert session.get(f"{server.url}/health").status_code == 200
            assert "Traceback" not in server.log()


@tried
@described.by_fixture("with_bounds").parametrize()
def test_no_request_is_a_5xx(case: Any, send: Any) -> None:
    """Requests within the documented schema, and near it, never get a 5xx."""
    check(case, send(case))


@tried
@described.by_fixture("examples_alone").parametrize()
def test_no_example_is_a_5xx(case: Any, send: Any) -> None:
    """Examples of the remaining routes never get a 5xx."""
    check(case, send(case))


def reachable(case: Any) -> Any:
    """Fix the endpoint and drop fields that would always be refused or time out, so that bounds are tried up to the
    engine.
    """
    if case.meta.phase.name.value == "coverage":
        if "name" in (case.path_parameters or {}) and "invocations" in case.path:
            case.path_parameters["name"] = "assistant"
        if str((case.headers or {}).get(TIMEOUT_HEADER)) == SMALLEST:
            del case.headers[TIMEOUT_HEADER]
        if isinstance(case.body, dict):
            if str(case.body.get("timeout")) == SMALLEST:
                del case.body["timeout"]
            if case.body.get("logprobs") is None:
                case.body.pop("top_logprobs", None)
            case.body.update({field: "0" for field in ("prompt", "input") if case.body.get(field) == ""})
    return case


def check(case: Any, answer: Any) -> None:
    """Check that the answer is below 500, or a 504 if the request set a time limit."""
    own = isinstance(case.body, dict) and case.body.get("timeout") is not None
    limited = own or TIMEOUT_HEADER.lower() in {name.lower() for name in case.headers or {}}
    assert answer.status_code < 500 or (answer.status_code == 504 and limited), (answer.status_code, answer.text)
