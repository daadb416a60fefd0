"""Adapters loaded and unloaded over HTTP, in vLLM's forms and words, in every worker, engine and start of a server."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from instant_model import write_instant_model
from processes import gone
from server_calls import BODY, asking, engine_pid, engine_pids, until
from server_processes import ENGINE
from serving_process import Running, running
from transformers import AutoTokenizer

from mlflow_llm.serving.control.plan import PlannedAdapter
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.endpoints.adapters import DynamicAdapter
from mlflow_llm.serving.endpoints.gateways import AdapterReport, EndpointReport, Gateway
from mlflow_llm.serving.http.management import lora_adapters
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import Capabilities, EngineInfo
from mlflow_llm.serving.interface.errors import (
    InvalidField,
    ModelNotFound,
    NotFound,
    PackagingError,
    PermissionDenied,
    RequestError,
    ServingError,
)
from mlflow_llm.serving.interface.request import Message, RawChat
from mlflow_llm.serving.routing.plan_follower import with_chat
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView
from mlflow_llm.serving.tasks.prompt.text import TextModel

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
FULL = (
    "The lora adapter 'legal' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to "
    "True."
)


def post(server: Running, path: str, **body: Any) -> tuple[int, str]:
    with asking(server, body, path) as answer:
        text = answer.read().decode()
        return answer.status, text if answer.status == 200 else json.loads(text)["error"]["message"]


def texts(server: Running, model: str, number: int = 6) -> set[str]:
    """Return the replies to ``number`` requests, each on a new connection, so that every worker is asked."""
    found = set()
    for _ in range(number):
        with asking(server, BODY | {"model": model}) as answer:
            reply = json.loads(answer.read())
        found.add(reply["choices"][0]["message"]["content"] if answer.status == 200 else f"{answer.status}")
    return found


def models(server: Running) -> set[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=240) as answer:
        return {model["id"] for model in json.load(answer)["data"]}


def adapter(place: Path) -> Path:
    place.mkdir(parents=True)
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes(b"")
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with ``allowed``, ``secret`` beside it, and links to the latter."""
    root = tmp_path_factory.mktemp("loras")
    for name in ("legal", "poet"):
        adapter(root / "allowed" / name)
    adapter(root / "secret")
    (root / "allowed" / "link").symlink_to(root / "secret")
    (root / "allowed" / "linked").mkdir()
    (root / "allowed" / "linked" / "adapter_config.json").write_text("{}")
    (root / "allowed" / "linked" / "adapter_model.safetensors").symlink_to(
        root / "secret" / "adapter_model.safetensors"
    )
    return root


def serving(place: Path, bundle: Bundle, **settings: Any) -> Any:
    return running(
        bundle,
        engine=ENGINE,
        workers=2,
        database=f"sqlite:///{place / 'serving.db'}",
        state_dir=str(place),
        **settings,
    )


def test_adapters_come_and_go_in_every_worker_engine_and_start(place: Path) -> None:
    """An adapter is usable in every worker under both names, survives a killed engine and a restart, and is replaced
    and unloaded.
    """
    sources = f"{place / 'allowed'}, models:/team-*"
    legal = str(place / "allowed" / "legal")
    bundle = write_instant_model(place / "model")
    with serving(place, bundle, adapter_sources=sources) as server:
        plain = texts(server, "assistant")
        added = post(server, LOAD, lora_name="legal", lora_path=legal)
        assert added == (200, "Success: LoRA adapter 'legal' added successfully.")
        text = texts(server, "assistant:legal")
        assert len(text) == 1
        assert text == texts(server, "legal") != plain
        assert "assistant:legal" in models(server)
        assert post(server, LOAD, lora_name="legal", lora_path=legal) == (400, FULL)
        again = post(server, LOAD, lora_name="legal", lora_path=legal, load_inplace=True, pinned=True)
        assert again == added
        _refusals(server, place)
        pid = engine_pid(server)
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid) and engine_pids(server) - {pid} != set())
        assert texts(server, "legal") == text
    with serving(place, bundle, adapter_sources=sources) as server:
        assert texts(server, "legal") == text
        assert post(server, UNLOAD, lora_name="legal") == (200, "Success: LoRA adapter 'legal' removed successfully.")
        assert texts(server, "legal") == texts(server, "assistant:legal") == {"404"}
        assert "assistant:legal" not in models(server)
        assert post(server, UNLOAD, lora_name="legal") == (404, "The lora adapter 'legal' cannot be found.")


def _refusals(server: Running, place: Path) -> None:
    """Check that paths outside the allowed directories, paths that are not adapters and taken names are refused."""
    allowed = place / "allowed"
    for path in (
        place / "secret",
        allowed / "link",
        allowed / "linked",
        allowed / ".." / "secret",
        allowed,
        "/",
        "/etc",
        "relative",
        f"{allowed}/\0",
        "models:/private/1",
        "models:/team-x/../private/1",
    ):
        status, text = post(server, LOAD, lora_name="x", lora_path=str(path))
        assert (status, text.split(":")[0]) == (403, "lora_path"), path
    missing = allowed / "missing"
    found = post(server, LOAD, lora_name="x", lora_path=str(missing))
    assert found == (404, f"Loading lora x failed: No adapter found for {missing}")
    legal = str(allowed / "legal")
    conflict = "The lora adapter name 'assistant' conflicts with a served base model."
    assert post(server, LOAD, lora_name="assistant", lora_path=legal) == (400, conflict)
    assert post(server, LOAD, lora_name="pirate", lora_path=legal, load_inplace=True)[0] == 400
    needed = "Both 'lora_name' and 'lora_path' must be provided."
    assert post(server, LOAD, lora_name="x") == post(server, LOAD, lora_path=legal, lora_name="") == (400, needed)
    assert post(server, UNLOAD) == (400, "'lora_name' needs to be provided to unload a LoRA adapter.")
    for name in ("../x", "a:b", "x" * 129, ".x", 3):
        assert post(server, LOAD, lora_name=name, lora_path=legal)[0] == 400
    assert post(server, LOAD, lora_name="x", lora_path=legal, model="nobody")[0] == 404
    assert post(server, LOAD, lora_name="x", lora_path=legal, other=1)[0] == 400
    assert post(server, LOAD, lora_name="x", lora_path=legal, pinned="yes")[0] == 400
    assert "x" not in {name.rpartition(":")[2] for name in models(server)}


def fake_server(found: Any = None, **settings: Any) -> Any:
    """Return a stand-in for a server with these settings and a registry of ``found``."""

    def find(uris: tuple[str, ...]) -> Any:
        if isinstance(found, Exception):
            raise found
        return (SimpleNamespace(bundle=SimpleNamespace(adapters=found, tokenizer_dir="/t")),)

    return SimpleNamespace(settings=ServerSettings(**settings), find_models=find)


def test_loading_is_off_by_default() -> None:
    """A server without adapter_sources loads nothing from anywhere, and says which option would."""
    with pytest.raises(PermissionDenied, match="--adapter-sources"):
        lora_adapters.check_allowed(fake_server(), "/srv/legal")


@pytest.mark.parametrize("places", ["/", "relative", "models:/", "/srv, https://example.org"])
def test_sources_are_directories_or_names(places: str) -> None:
    """A source is a directory or a model name: the root, the whole registry and other schemes are refused."""
    with pytest.raises(InvalidField, match="adapter_sources"):
        ServerSettings(adapter_sources=places)


@pytest.mark.parametrize("uri", ["models:/team-a/1", "models:/team-a@champion", "models:/legal/3"])
def test_registered_models_are_allowed_by_name(uri: str) -> None:
    """A registered model is allowed by its full name or by a pattern, with any of its versions and aliases."""
    lora_adapters.check_allowed(fake_server(adapter_sources="models:/team-*, models:/legal"), uri)
    with pytest.raises(PermissionDenied):
        lora_adapters.check_allowed(fake_server(adapter_sources="models:/other"), uri)


def test_the_adapter_of_a_registered_model() -> None:
    """The adapter of a registered model is its only one or the one of the given name; otherwise the error says so."""
    path = lambda found, name="x": lora_adapters.source_path(fake_server(found), "models:/team/1", name)  # noqa: E731
    assert path({"legal": "/l"}) == ("/l", "/t")
    assert path({"legal": "/l", "x": "/x"}) == ("/x", "/t")
    for none in ({}, {"a": "/a", "b": "/b"}):
        with pytest.raises(InvalidField, match="lora_path"):
            path(none)
    with pytest.raises(NotFound, match="No adapter found for models:/team/1"):
        path(ModelNotFound("no such model"))
    with pytest.raises(RequestError, match="Loading lora x failed: it is broken"):
        path(PackagingError("it is broken"))


def gateway(name: str, state: str, *, revision: str = "1", serving: bool = True, message: str = "") -> Gateway:
    report = AdapterReport(revision=revision, state=state, message=message)  # type: ignore[arg-type]
    reports = {"id": EndpointReport(version=1, ready=True, adapters={"x": report})}
    return Gateway(gateway=name, name=f"{name}:8000", started_ms=0, serving=serving, beat=0, reports=reports)


@pytest.mark.parametrize(
    ("refusal", "others", "expected"),
    [
        ("it does not fit", (), "Loading lora x failed: it does not fit"),
        (
            "",
            (gateway("b", "REFUSED", message="no such directory"),),
            "Loading lora x failed: gateway b:8000: no such dir",
        ),
        ("", (gateway("own", "REFUSED"), gateway("b", "LOADED"), gateway("c", "LOADING", serving=False)), ""),
        ("", (gateway("b", "LOADING"),), "not in every engine yet"),
        ("", (gateway("b", "LOADED", revision="0"),), "not in every engine yet"),
    ],
)
def test_an_adapter_is_added_when_every_gateway_has_it(
    tmp_path: Path, refusal: str, others: tuple[Gateway, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller waits for all gateways that serve, gets the reason of one that refuses, and nothing of that stays."""
    monkeypatch.setattr(lora_adapters, "WAIT_SECONDS", 0.0)
    taken, asked = [], []
    new = DynamicAdapter(name="x", uri="/a", path="/a", revision="1")
    planned = SimpleNamespace(
        name="chat",
        id="id",
        entities=(
            SimpleNamespace(
                adapters=(PlannedAdapter(name="x", revision="1", refusal=refusal),),
                config=SimpleNamespace(model=SimpleNamespace(bundle=SimpleNamespace(adapters={}))),
            ),
        ),
    )
    entity = SimpleNamespace(
        endpoint="chat",
        entity="e",
        engine=SimpleNamespace(info=SimpleNamespace(capabilities=Capabilities())),
        view=SimpleNamespace(text=SimpleNamespace(check_adapter=lambda *given: None)),
    )
    endpoints = SimpleNamespace(route=lambda called: (entity, None), entities=lambda: iter((entity,)))
    endpoints.seen_by = lambda caller: endpoints
    store = SimpleNamespace(
        put=lambda *a, **k: asked.append(k["pinned"]) or (new, None),
        take_back=lambda *a: taken.append(a),
        get=lambda *a: new,
        contents=SimpleNamespace(put=lambda content, parts, **more: None),
    )
    server = fake_server(adapter_sources=str(tmp_path))
    server.offload = lambda size, function, *given: function(*given)
    server.endpoints = endpoints
    server.follower = SimpleNamespace(planned=lambda name: (planned, True), gateway="own")
    gateways = SimpleNamespace(all=lambda: others)
    server.managed_endpoints = lambda: SimpleNamespace(adapters=store, gateways=gateways)
    body = {"lora_name": "x", "lora_path": str(adapter(tmp_path / "x")), "pinned": True}
    request = SimpleNamespace(json=lambda: body, caller=SimpleNamespace(key_id=""), actor=None)
    if expected:
        with pytest.raises(ServingError, match=expected):
            lora_adapters.load(server, request)
    else:
        assert b"Success" in lora_adapters.load(server, request).body
    assert (taken, asked) == ([("chat", new, None)] if "failed" in expected else [], [True])


OWN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def prompts(server: Running, model: str, number: int = 6) -> set[str]:
    """Return the prompts made of one chat, each asked on a new connection, so that every worker is asked."""
    found = set()
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(number):
        with asking(server, body, "/tokenize") as it:
            reply = json.loads(it.read())
        with asking(server, {"model": model, "tokens": reply["tokens"]}, "/detokenize") as it:
            found.add(json.loads(it.read())["prompt"])
    return found


def trained(place: Path, template: str, *tokens: str, eos: str = "</s>") -> str:
    """Write an adapter as TRL leaves it: a tokenizer with the template beside it, and further tokens; return its
    path."""
    adapter(place)
    beside = AutoTokenizer.from_pretrained(write_instant_model(place.with_suffix(".model")).tokenizer_dir)
    beside.add_tokens(list(tokens))
    beside.chat_template, beside.eos_token = template, eos
    beside.save_pretrained(place)
    return str(place)


def test_an_adapter_has_its_own_template_in_every_worker_and_start(tmp_path: Path) -> None:
    """Its requests use the template beside it until it is replaced or unloaded: in both gateways of a database, also
    in one that starts later, and after the engine was killed.
    """
    bundle, place = write_instant_model(tmp_path / "model"), tmp_path / "allowed"
    first, other = trained(place / "first", OWN), trained(place / "other", OWN.replace("[", "("))
    model = {"<user>hi</s><assistant>"}
    with serving(tmp_path, bundle, adapter_sources=str(place)) as server:
        assert prompts(server, "assistant") == model
        assert post(server, LOAD, lora_name="legal", lora_path=first)[0] == 200
        assert prompts(server, "legal") == prompts(server, "assistant:legal") == {"[user]hi"}
        assert prompts(server, "assistant") == prompts(server, "assistant:pirate") == model
        pid = engine_pid(server)
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid) and engine_pids(server) - {pid} != set())
        assert prompts(server, "legal") == {"[user]hi"}
        with serving(tmp_path, bundle, adapter_sources=str(place)) as gateway:
            assert prompts(gateway, "legal") == {"[user]hi"}
            assert post(gateway, LOAD, lora_name="legal", lora_path=other, load_inplace=True)[0] == 200
            assert prompts(gateway, "legal") == {"(user]hi"}
            until(lambda: prompts(server, "legal") == {"(user]hi"})
            plain = str(adapter(place / "plain"))
            assert post(gateway, LOAD, lora_name="legal", lora_path=plain, load_inplace=True)[0] == 200
            assert prompts(gateway, "legal") == model
            assert post(gateway, UNLOAD, lora_name="legal")[0] == 200
        assert post(server, LOAD, lora_name="poet", lora_path=first)[0] == 200
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        for body in (BODY, BODY | {"stream": True}, BODY | {"tools": [tool]}):
            with asking(server, body | {"model": "poet"}) as answer:
                assert answer.status == 200
                assert answer.read()
        _template_refusals(server, place)


def _template_refusals(server: Running, place: Path) -> None:
    """Check that a template that cannot be rendered, and a tokenizer with other tokens, are refused by their names."""
    for name, template, why in (
        ("unread", "{% for m in", "chat_template 'adapter:unread': line 1: "),
        ("silent", "{{ 'Hello' }}", "chat_template 'adapter:silent' does not render a conversation: "),
    ):
        path = trained(place / name, template)
        status, said = post(server, LOAD, lora_name=name, lora_path=path)
        assert status == 400
        assert said.startswith(f"Loading lora {name} failed: {why}")
    path = trained(place / "more", OWN, "<|more|>")
    differs = "Loading lora more failed: its tokenizer differs from the model's: '<|more|>' is token 257 there and no"
    status, said = post(server, LOAD, lora_name="more", lora_path=path)
    assert (status, said[: len(differs)]) == (400, differs)
    path = trained(place / "ends", OWN, eos="a")
    status, said = post(server, LOAD, lora_name="ends", lora_path=path)
    assert status == 200
    assert said.startswith("Success: LoRA adapter 'ends' added successfully.\nNote: it ends a text with 'a', the model")
    (place / "bytes").mkdir()
    (place / "bytes" / "adapter_config.json").write_text("{}")
    (place / "bytes" / "chat_template.jinja").write_bytes(b"\xff")
    status, said = post(server, LOAD, lora_name="bytes", lora_path=str(place / "bytes"))
    assert (status, said) == (400, "Loading lora bytes failed: adapters: chat_template.jinja in bytes cannot be read")


def test_the_tokenizer_of_a_registered_adapter_is_compared(tmp_path: Path) -> None:
    """An adapter that was logged over a model with other tokens is refused, as if its tokenizer were beside it."""
    text = TextModel(write_instant_model(tmp_path / "model"))
    server = fake_server()
    server.offload = lambda size, function, *given: function(*given)
    entity = SimpleNamespace(endpoint="chat", view=SimpleNamespace(text=text))
    server.endpoints = SimpleNamespace(entities=lambda: iter((entity,)))
    own = lambda there: lora_adapters.own_template_of(  # noqa: E731
        server, SimpleNamespace(name="chat"), "x", str(adapter(tmp_path / "a" / there)), str(tmp_path / there)
    )
    trained(tmp_path / "same", OWN)
    trained(tmp_path / "more", OWN, "<|more|>")
    assert own("same") == ("", "")
    with pytest.raises(RequestError, match=r"'<\|more\|>' is token 257 there and no token here"):
        own("more")


def test_an_adapter_with_a_template_chats_over_a_model_without(tmp_path: Path) -> None:
    """The adapter's chats are served, and the model's own still refused by name."""
    bundle = write_instant_model(tmp_path / "model")
    Path(bundle.tokenizer_dir, "chat_template.jinja").unlink()
    plain = TextModel(bundle)
    info = EngineInfo(
        content_hash="0" * 64, tasks=("completions",), vocab_size=259, max_model_len=512, max_num_seqs=1,
        max_kv_tokens=512, capabilities=Capabilities(),
    )  # fmt: skip
    assert with_chat(info, plain) == info
    text = plain.with_adapters({"legal": OWN})
    view = EndpointView(name="m", info=with_chat(info, text), text=text, adapters=("legal",))
    chat = RawChat(messages=(Message(role="user", content="hi"),))
    tokens = prepare(msgspec.structs.replace(chat, adapter="legal"), view).sequences[0].prompt_token_ids
    assert text.decode(tokens, skip_special_tokens=False) == "[user]hi"
    with pytest.raises(InvalidField, match="this model has no chat template"):
        prepare(chat, view)
    assert plain.templates == {}
