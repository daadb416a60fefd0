"""A stream that breaks off, as the clients of its routes tell it to their users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving_process import Running

openai = pytest.importorskip("openai")

pytestmark = [
    # the clients' own warnings, about their own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
BASES = ["/v1", "/serving-endpoints"]
LIMIT = {"X-Request-Timeout": "2"}
MESSAGES = [{"role": "user", "content": "Hi"}]
LATE = {"messages": MESSAGES, "max_tokens": 4000, "temperature": 0}  # eight seconds of it


@pytest.fixture
def workspace(observed: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Configure the server as a Databricks workspace."""
    monkeypatch.setenv("DATABRICKS_HOST", observed.url)
    monkeypatch.setenv("DATABRICKS_TOKEN", "token")
    return observed


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("task", ["chat", "completions"])
def test_openai_raises(observed: Running, base: str, task: str) -> None:
    """The openai client yields chunks up to the time limit, then raises ``APIError`` with our message, on Databricks'
    routes too.
    """
    with openai.OpenAI(base_url=observed.url + base, api_key="x", max_retries=0) as client:
        limited: dict = {"model": "assistant", "stream": True, "extra_headers": LIMIT}
        if task == "chat":
            stream = client.chat.completions.create(**LATE, **limited)
        else:
            stream = client.completions.create(prompt="Hi", max_tokens=4000, temperature=0, **limited)
        assert stream.response.status_code == 200
        with pytest.raises(openai.APIError, match="timeout") as caught:
            _drain(stream)
        assert caught.value.code == "timeout"
        assert caught.value.chunks > 2  # type: ignore[attr-defined]


def test_a_response_has_failed(observed: Running) -> None:
    """The openai client gets a response's events up to the time limit, then an error and the failed response."""
    ask = {"model": "assistant", "input": "Hi", "max_output_tokens": 4000, "temperature": 0, "extra_headers": LIMIT}
    with openai.OpenAI(base_url=f"{observed.url}/v1", api_key="x", max_retries=0) as client:
        *events, error, last = client.responses.create(**ask, stream=True)
    assert (error.type, error.code) == ("error", "timeout")
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert last.response.error.message == error.message
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(texts) > 2
    assert last.response.output_text == "".join(texts)


@pytest.mark.parametrize("base", BASES)
def test_langchain_raises(observed: Running, base: str) -> None:
    """langchain-openai passes on the openai client's error."""
    ChatOpenAI = pytest.importorskip("langchain_openai").ChatOpenAI
    model = ChatOpenAI(
        base_url=observed.url + base, api_key="x", model="assistant", max_tokens=4000, default_headers=LIMIT
    )
    with pytest.raises(openai.APIError, match="timeout"):
        _drain(model.stream("Hi"))


def test_databricks_client_sees_the_error(workspace: Running) -> None:
    """MLflow's Databricks client knows no errors in streams: the error is its last chunk, in both forms."""
    from mlflow.deployments import get_deploy_client

    stream = get_deploy_client("databricks").predict_stream(endpoint="assistant", inputs={**LATE, "timeout": 2})
    *chunks, last = stream
    assert len(chunks) > 2
    assert all("choices" in chunk for chunk in chunks)
    assert set(last) == {"error", "error_code", "message"}
    assert (last["error_code"], last["error"]["code"]) == ("INTERNAL_ERROR", "timeout")
    assert last["message"] == last["error"]["message"]


def test_our_client_raises(observed: Running) -> None:
    """The plugin's client raises MLflow's exception with the message, on MLflow's route."""
    from mlflow.deployments import get_deploy_client
    from mlflow.exceptions import MlflowException

    client = get_deploy_client(observed.url.replace("http://", "llm://"))
    with pytest.raises(MlflowException, match="timeout"):
        _drain(client.predict_stream("assistant", {**LATE, "timeout": 2}))


def _drain(stream: Iterator) -> None:
    """Read to the end; an exception on the way carries how many ``chunks`` came before it."""
    chunks = 0
    try:
        for _ in stream:
            chunks += 1
    except Exception as error:
        error.chunks = chunks  # type: ignore[attr-defined]
        raise
