"""A real server over HTTP and gRPC, asked by Triton's own clients: what they were answered is what the ledger says."""

from __future__ import annotations

import json
import queue
import re
import ssl
import urllib.request
import warnings
from collections.abc import Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from certificates import Authority
from gated_core import steps_more, steps_up_to
from instant_model import write_instant_model
from server_calls import until
from serving_process import GATED_CORE, Running, free_port, running

from mlflow_llm.serving.metering import Limits, Store, Usage, UsageFilter
from mlflow_llm.serving.metering.accounts.keys import Keys

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    http = pytest.importorskip("tritonclient.http")
    rpc = pytest.importorskip("tritonclient.grpc")
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype


class Served:
    """A server with keys, its gRPC address and its store."""

    def __init__(self, server: Running, port: int, store: Store) -> None:
        self.server, self.address, self.store = server, f"127.0.0.1:{port}", store
        self.of_tenant("team")

    def of_tenant(self, name: str) -> None:
        """Make further requests for this tenant, and look at its rows alone."""
        self._tenant, self._headers = name, self.key(name)

    @property
    def headers(self) -> dict[str, str]:
        """Return new headers, since the HTTP client adds its own to those given."""
        return dict(self._headers)

    def key(self, tenant: str, **options: Any) -> dict[str, str]:
        return {"authorization": f"Bearer {Keys(self.store).create(tenant, **options)[0]}"}

    def rows(self) -> list[Any]:
        return list(Usage(self.store).rows(UsageFilter(tenant=self._tenant)))

    def ids(self) -> set[str]:
        return {row.request_id for row in self.rows()}

    def settled(self, before: set[str], count: int = 1) -> list[Any]:
        """Return the rows added since ``before``, once none of them is open."""
        new: list[Any] = []

        def are_there() -> bool:
            new[:] = [row for row in self.rows() if row.request_id not in before]
            return len(new) == count and all(row.status != "open" for row in new)

        until(are_there)
        return new

    def health(self) -> dict[str, Any]:
        return health(self.server.url, self.key("managers", scopes=("manage",)))


def health(url: str, headers: dict[str, str] | None = None, context: ssl.SSLContext | None = None) -> dict[str, Any]:
    asked = urllib.request.Request(f"{url}/health", headers=headers or {})
    with urllib.request.urlopen(asked, timeout=240, context=context) as answer:
        found: dict[str, Any] = json.load(answer)["endpoints"]["assistant"]
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root: Path = tmp_path_factory.mktemp("kserve")
    url, port = f"sqlite:///{root / 'ledger.db'}", free_port()
    store = Store(url)
    places = {"database": url, "state_dir": str(root / "state"), "max_body_bytes": 2**20}
    with running(write_instant_model(root), core=GATED_CORE, grpc_port=port, require_keys=True, **places) as server:
        yield Served(server, port, store)
    store.close()


@pytest.fixture(autouse=True)
def tenant_of_its_own(served: Served, request: pytest.FixtureRequest) -> None:
    """Give each test a tenant of its own, since requests abandoned by another test may be settled late."""
    served.of_tenant(request.node.name[:60])


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with rpc.InferenceServerClient(served.address) as client:
        yield client


def inputs(module: Any, length: int = 4, **more: Any) -> list[Any]:
    """Return a prompt of six tokens and the number to generate."""
    given = {"input_ids": np.arange(10, 16, dtype=np.int32)[None], "request_output_len": np.array([[length]], np.int32)}
    return [of(module, name, values) for name, values in (given | more).items()]


def of(module: Any, name: str, values: Any) -> Any:
    array = np.asarray(values)
    found = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array)
    return found


STREAMING = {"streaming": np.array([True])}


class Stream:
    """A client's stream and its responses."""

    def __init__(self, client: Any, headers: dict[str, str]) -> None:
        self.responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.client = client
        client.start_stream(lambda result, error: self.responses.put((result, error)), headers=headers)

    def ask(self, given: list[Any], name: str = "", **options: Any) -> None:
        self.client.async_stream_infer("assistant", given, request_id=name, **options)

    def next(self) -> Any:
        """Return the next response, or raise its error."""
        result, error = self.responses.get(timeout=240)
        if error is not None:
            raise error
        return result.get_response()

    def all(self) -> list[Any]:
        """Return the responses up to and including the final one."""
        found = [self.next()]
        while not found[-1].parameters["triton_final_response"].bool_param:
            found.append(self.next())
        return found


def values(response: Any, name: str) -> list[Any]:
    return rpc.InferResult(response).as_numpy(name).reshape(-1).tolist()


def test_both_protocols_answer_the_same_and_are_billed(served: Served, client: Any) -> None:
    """HTTP and gRPC give the same ids and lengths for the model, a version and an adapter, and each request is billed
    its tokens.
    """
    before = served.ids()
    with http.InferenceServerClient(f"127.0.0.1:{served.server.port}", network_timeout=240) as over_http:
        for name, version in (("assistant", ""), ("assistant", "1"), ("assistant:pirate", "")):
            found = [
                one.infer(name, inputs(module, 5), model_version=version, request_id="mine", headers=served.headers)
                for module, one in ((http, over_http), (rpc, client))
            ]
            ids = [one.as_numpy("output_ids").tolist() for one in found]
            assert ids[0] == ids[1]
            assert {one.as_numpy("sequence_length").item() for one in found} == {len(ids[0][0])}
            assert found[0].get_response()["id"] == found[1].get_response().id == "mine"
            assert found[1].get_response().model_version == "1"
    rows = served.settled(before, 6)
    assert {(row.status, row.prompt_tokens, row.completion_tokens) for row in rows} == {("ok", 6, 5)}


def test_a_stream_has_a_response_for_each_token(served: Served, client: Any) -> None:
    """A stream has a response for each token, which join to the whole answer, and an empty last one; each request is
    billed what came.
    """
    before = served.ids()
    whole = client.infer("assistant", inputs(rpc, 7), headers=served.headers).as_numpy("output_ids")[0].tolist()
    stream = Stream(client, served.headers)
    stream.ask(inputs(rpc, 7, **STREAMING), "a", enable_empty_final_response=True)
    *tokens, last = stream.all()
    assert [values(one, "output_ids") for one in tokens] == [[token] for token in whole]
    assert {values(one, "sequence_length")[0] for one in tokens} == {1}
    assert {one.id for one in (*tokens, last)} == {"a"}
    assert len(last.outputs) == 0
    stream.ask(inputs(rpc, 7), "b")
    (once,) = stream.all()
    assert values(once, "output_ids") == whole
    text = [of(rpc, "text_input", np.array([b"hello"], object)), of(rpc, "max_tokens", np.array([6], np.int32))]
    said = client.infer("assistant", text, headers=served.headers).as_numpy("text_output")[0]
    stream.ask([*text, of(rpc, "streaming", np.array([True]))], "c", enable_empty_final_response=True)
    *pieces, _ = stream.all()
    assert b"".join(values(one, "text_output")[0] for one in pieces) == said
    client.stop_stream()
    rows = served.settled(before, 5)
    assert {row.status for row in rows} == {"ok"}
    assert sorted(row.completion_tokens for row in rows) == [6, 6, 7, 7, 7]


def test_requests_of_a_stream_run_together_and_fail_alone(served: Served, client: Any) -> None:
    """Requests of one stream run concurrently, and a refused one gets its own error with its id."""
    stream = Stream(client, served.headers)
    with steps_up_to(served.server.model_dir, 0):
        stream.ask(inputs(rpc, 3, **STREAMING), "held", enable_empty_final_response=True)
        stream.ask(inputs(rpc, 3, temperature=np.array([-1], np.float32)), "bad")
        result, error = stream.responses.get(timeout=240)
        assert (result, "temperature: -1.0" in str(error)) == (None, True)
        stream.client.async_stream_infer("nobody", inputs(rpc))
        with pytest.raises(InferenceServerException, match="no endpoint is called 'nobody'"):
            stream.next()
    assert {one.id for one in stream.all()} == {"held"}
    client.stop_stream()


def test_a_client_that_cancels_is_settled(served: Served, client: Any) -> None:
    """A cancelled request leaves the engine and pays for what was generated until then, streamed or not."""
    until(lambda: served.health()["running"] == 0)
    before = served.ids()
    with steps_more(served.server.model_dir, 50):
        stream = Stream(client, served.headers)
        stream.ask(inputs(rpc, 4000, **STREAMING))
        stream.next()
        client.stop_stream(cancel_requests=True)
        (row,) = served.settled(before)
    assert (row.status, 0 < row.completion_tokens < 4000) == ("aborted", True), row
    before = served.ids()
    with steps_up_to(served.server.model_dir, 0):
        call = client.async_infer("assistant", inputs(rpc), lambda result, error: None, headers=served.headers)
        until(lambda: served.ids() - before)
        call.cancel()
        (row,) = served.settled(before)
    assert row.status == "aborted"
    until(lambda: served.health()["running"] == 0)


@pytest.mark.parametrize(
    ("name", "change", "headers", "status"),
    [
        ("assistant", {}, {}, "UNAUTHENTICATED"),
        ("assistant", {}, {"authorization": "Bearer sk-wrong"}, "UNAUTHENTICATED"),
        ("nobody", {}, None, "NOT_FOUND"),
        ("assistant", {"temperature": np.array([-1], np.float32)}, None, "INVALID_ARGUMENT"),
        ("assistant", {"request_output_len": np.array([[10**6]], np.int32)}, None, "INVALID_ARGUMENT"),
        ("assistant", STREAMING, None, "INVALID_ARGUMENT"),
        ("assistant", {"embedding_bias": np.zeros((1, 2**19), np.float32)}, None, "RESOURCE_EXHAUSTED"),
    ],
)
def test_refusals_have_their_statuses(
    served: Served, client: Any, name: str, change: dict[str, Any], headers: dict[str, str] | None, status: str
) -> None:
    """Refused callers, models, tensors and oversized messages have their gRPC status codes."""
    with pytest.raises(InferenceServerException) as refused:
        client.infer(name, inputs(rpc, **change), headers=served.headers if headers is None else headers)
    assert refused.value.status() == f"StatusCode.{status}", refused.value


def test_a_deadline_and_a_limit(served: Served, client: Any) -> None:
    """A client's deadline ends its request in the engine too; a limit that is used up is refused at once."""
    before = served.ids()
    with steps_up_to(served.server.model_dir, 0):
        with pytest.raises(InferenceServerException, match=r"Deadline|time limit"):
            client.infer("assistant", inputs(rpc), headers=served.headers, client_timeout=0.5)
        served.settled(before)
    Limits(served.store).set("tenant", "small", "otpm", 60)
    small = served.key("small")
    client.infer("assistant", inputs(rpc, 50), headers=small)
    with pytest.raises(InferenceServerException, match=r"otpm|output tokens") as refused:
        client.infer("assistant", inputs(rpc, 50), headers=small)
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


DOCUMENT = Path(__file__).parents[3] / "docs" / "kserve.md"


def test_the_examples_of_the_document(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented Python and curl examples run as printed, but for addresses and keys, and are billed."""
    before = served.ids()
    for module in (http, rpc):
        make = module.InferenceServerClient
        for name in {"infer", "start_stream"} & set(vars(make)):
            monkeypatch.setattr(make, name, partialmethod(getattr(make, name), headers=served.headers))
    text = DOCUMENT.read_text()
    gateway = f"127.0.0.1:{served.server.port}"
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code.replace("localhost:8000", gateway).replace("localhost:8001", served.address), {})
    (body,) = re.findall(r"infer -H .*? -d '(.*?)'", text, re.DOTALL)
    kinds = {"Content-Type": "application/json"} | served.headers
    asked = urllib.request.Request(f"http://{gateway}/v2/models/assistant/infer", body.encode(), kinds)
    with urllib.request.urlopen(asked, timeout=240) as answer:
        (output,) = json.load(answer)["outputs"]
    assert (output["name"], output["shape"]) == ("text_output", [1])
    assert {row.completion_tokens for row in served.settled(before, 3)} == {8}


def test_the_server_and_its_models(served: Served, client: Any) -> None:
    """Both clients get metadata, configuration, readiness and the index; requests about models need a key."""
    headers = served.headers
    with http.InferenceServerClient(f"127.0.0.1:{served.server.port}", network_timeout=240) as over_http:
        for one, as_json in ((client, {"as_json": True}), (over_http, {})):
            assert one.is_server_live()
            assert one.is_server_ready()
            assert one.get_server_metadata(**as_json)["name"] == "mlflow-llm"
            assert one.is_model_ready("assistant", headers=headers)
            metadata = one.get_model_metadata("assistant", headers=headers, **as_json)
            assert (metadata["name"], metadata["versions"]) == ("assistant", ["1"])
            assert {"input_ids", "text_input"} <= {entry["name"] for entry in metadata["inputs"]}
            config = one.get_model_config("assistant", "1", headers=headers, **as_json)
            config = config.get("config", config)
            assert config["input"][0]["data_type"] == "TYPE_INT32"
            assert config["model_transaction_policy"]["decoupled"] is True
            index = one.get_model_repository_index(headers=headers, **as_json)
            found = index["models"] if as_json else index
            assert [(entry["name"], entry["state"]) for entry in found] == [("assistant", "READY")]
            with pytest.raises(InferenceServerException):
                one.get_model_metadata("assistant")
            with pytest.raises(InferenceServerException, match="nobody"):
                one.get_model_metadata("nobody", headers=headers)


def is_answered(client: Any) -> bool:
    try:
        return bool(client.infer("assistant", inputs(rpc)))
    except InferenceServerException:
        return False


def test_tls_a_drain_and_a_killed_process(tmp_path: Path) -> None:
    """gRPC uses the gateway's certificates; a killed process is restarted; a drain finishes running calls and takes no
    others.
    """
    authority, port = Authority(tmp_path), free_port()
    cert, key, _ = authority.issue("server")
    bundle = write_instant_model(tmp_path / "model")
    files = {"tls_cert": cert, "tls_key": key}
    with running(bundle, core=GATED_CORE, grpc_port=port, until="listening on https", **files) as server:
        connect = partial(rpc.InferenceServerClient, f"localhost:{port}", ssl=True, root_certificates=authority.ca)
        url, context = (
            server.url.replace("http://127.0.0.1", "https://localhost"),
            ssl.create_default_context(cafile=authority.ca),
        )
        with connect() as client:
            assert client.infer("assistant", inputs(rpc)).as_numpy("output_ids").shape == (1, 4)
            (process,) = (
                one for one in psutil.Process(server.process.pid).children() if "rpc.main" in str(one.cmdline())
            )
            process.kill()
            until(lambda: is_answered(client))
            stream = Stream(client, {})
            with steps_up_to(server.model_dir, 0):
                stream.ask(inputs(rpc, 5, **STREAMING), enable_empty_final_response=True)
                until(lambda: sum(health(url, context=context)[name] for name in ("running", "waiting")))
                server.terminate()
                until(lambda: not client.is_server_ready())
                with pytest.raises(InferenceServerException, match="shutting down"):
                    client.infer("assistant", inputs(rpc))
            assert len(stream.all()) == 6
            client.stop_stream()
        server.process.wait(240)
        assert "Traceback" not in server.log()
