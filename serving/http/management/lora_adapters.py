"""Load and unload LoRA adapters while their model is served, with vLLM's request fields and messages.

``POST /v1/load_lora_adapter {lora_name, lora_path, load_inplace}``, ``POST /v1/unload_lora_adapter {lora_name}``. Two
fields are our own: ``model`` names the endpoint if there are several, and ``pinned``. The first route responds when
every worker and every replica has loaded the adapter, on all gateways of the database; the second when those of this
server have unloaded it. The setting ``adapter_sources`` says where adapters may come from. An adapter's requests use
the chat template in its directory, if it has one.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...control.plan import PlannedAdapter, PlannedEndpoint
from ...control.settings import MODELS
from ...dialects import DIALECTS
from ...endpoints.adapters import ContentGone, EndpointAdapters
from ...frontend.answer import Answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import (
    Conflict,
    InvalidField,
    ModelNotFound,
    NotFound,
    PackagingError,
    PermissionDenied,
    RequestError,
    Unavailable,
)
from ...interface.readers import Entry, boolean, record, short_text, text
from ...model_files.adapter_contents import CONFIG, WEIGHTS, AdapterContent, content_of, pieces, read_piece
from ...model_files.adapter_template import default_of, own_template
from ...model_files.model_uri import parse
from ...routing.plan_follower import PlanFollower
from ..route import Route

NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,126}[A-Za-z0-9_-])?")
NAMED = "up to 128 letters, digits, '_', '-' and '.', not starting with '-' or '.' and not ending with '.'"
WAIT_SECONDS = 60.0
CHECK_SECONDS = 0.05
UPLOADS = 3
LOAD = record(
    lora_name=Entry(text(NAME, NAMED), required="the name that requests call the adapter by"),
    lora_path=Entry(short_text(4096), required="a directory in peft's layout, or models:/name/version"),
    load_inplace=Entry(boolean, "Replace an adapter of that name; running requests finish with the old one"),
    pinned=Entry(boolean, "Engines never evict it"),
    model=Entry(short_text(256), "The endpoint, if there are several"),
)
UNLOAD = record(
    lora_name=Entry(text(NAME, NAMED), required="the adapter's name"),
    model=Entry(short_text(256), "The endpoint, if there are several"),
)


def load(server: WorkerState, request: Request) -> Answer:
    body = request.json()
    if not body.get("lora_name") or not body.get("lora_path"):
        raise RequestError("Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")
    given = LOAD(body, "")
    name, uri = given["lora_name"], given["lora_path"]
    check_allowed(server, uri)
    endpoint, follower = _endpoint(server, request, given.get("model"))
    _check_name(server, endpoint, name)
    path, tokenizer_dir = source_path(server, uri, name)
    template, note = own_template_of(server, endpoint, name, path, tokenizer_dir)
    adapters = server.managed_endpoints().adapters
    content = _content(server, name, path)
    for _ in range(UPLOADS):
        _store_content(server, adapters, request, name, path, content)
        try:
            new, old = adapters.put(
                endpoint.name,
                name,
                uri,
                path,
                replace=given.get("load_inplace", False),
                pinned=given.get("pinned", False),
                template=template,
                content_hash=content.content_hash,
                by=request.actor,
            )
            break
        except ContentGone:  # removed in between, because no adapter had it for a while
            continue
    else:
        raise Unavailable(f"the files of adapter {name!r} could not be kept in the database; try again")
    until = time.monotonic() + WAIT_SECONDS
    while True:
        planned, is_adopted = follower.planned(endpoint.name)
        if planned is None:
            raise NotFound(f"endpoint {endpoint.name} has just been deleted", param="model")
        now = adapters.get(endpoint.name, name)
        if now is None or now.revision != new.revision:
            raise Conflict(
                f"adapter {name!r} was replaced or unloaded by another request before it was in every engine"
            )
        found = [_of(entity.adapters, name, new.revision) for entity in planned.entities]
        for refusal in (one.refusal for one in found if one is not None and one.refusal):
            adapters.take_back(endpoint.name, new, old)
            raise RequestError(f"Loading lora {name} failed: {refusal}", param="lora_path")
        if is_adopted and all(one is not None for one in found):
            try:
                everywhere = _is_elsewhere(server, follower, endpoint.id, name, new.revision)
            except RequestError:
                adapters.take_back(endpoint.name, new, old)
                raise
            if everywhere:
                done = f"Success: LoRA adapter '{name}' added successfully."
                return _said("\n".join([done, *[note] * bool(note)]))
        if time.monotonic() > until:
            raise Unavailable(f"adapter {name!r} is not in every engine yet; it will be when there is room for it")
        time.sleep(CHECK_SECONDS)


def _content(server: WorkerState, name: str, path: str) -> AdapterContent:
    """Return the content of the adapter in ``path``. Raises ``RequestError``."""
    maximum = server.settings.max_adapter_storage
    try:  # on a thread, because reading weights takes long enough to hold up streams
        content: AdapterContent = server.offload(sys.maxsize, partial(content_of, path, maximum=maximum))
    except PackagingError as error:
        raise RequestError(f"Loading lora {name} failed: {error}", param="lora_path") from error
    return content


def _store_content(
    server: WorkerState, adapters: EndpointAdapters, request: Request, name: str, path: str, content: AdapterContent
) -> None:
    """Put the files of an adapter where all hosts can fetch them. Raises ``LimitExceeded``, ``RequestError``."""
    parts = (server.offload(sys.maxsize, partial(read_piece, *piece)) for piece in pieces(content, path))
    try:
        adapters.contents.put(content, parts, maximum=server.settings.max_adapter_storage, key_id=request.caller.key_id)
    except PackagingError as error:
        raise RequestError(f"Loading lora {name} failed: {error}", param="lora_path") from error


def _is_elsewhere(server: WorkerState, follower: PlanFollower, endpoint_id: str, name: str, revision: str) -> bool:
    """Return whether all other gateways that serve have the adapter. Raises ``RequestError`` if one refuses it."""
    everywhere = True
    for gateway in server.managed_endpoints().gateways.all():
        if gateway.gateway == follower.gateway or not gateway.serving:
            continue
        report = gateway.reports.get(endpoint_id)
        found = None if report is None else report.adapters.get(name)
        if found is None or found.revision != revision or found.state == "LOADING":
            everywhere = False
        elif found.state == "REFUSED":
            raise RequestError(
                f"Loading lora {name} failed: gateway {gateway.name}: {found.message}", param="lora_path"
            )
    return everywhere


def unload(server: WorkerState, request: Request) -> Answer:
    body = request.json()
    if not body.get("lora_name"):
        raise RequestError("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
    given = UNLOAD(body, "")
    name = given["lora_name"]
    _check_on(server)
    endpoint, follower = _endpoint(server, request, given.get("model"))
    server.managed_endpoints().adapters.remove(endpoint.name, name, by=request.actor)
    until = time.monotonic() + WAIT_SECONDS
    while True:
        planned, is_adopted = follower.planned(endpoint.name)
        left = () if planned is None else tuple(_of(entity.adapters, name) for entity in planned.entities)
        if is_adopted and not any(left):
            return _said(f"Success: LoRA adapter '{name}' removed successfully.")
        if time.monotonic() > until:
            raise Unavailable(f"adapter {name!r} is not gone from every worker yet")
        time.sleep(CHECK_SECONDS)


def _said(words: str) -> Answer:
    return Answer(body=words.encode(), content_type="text/plain; charset=utf-8")


def _of(adapters: Sequence[PlannedAdapter], name: str, revision: str | None = None) -> PlannedAdapter | None:
    found = (one for one in adapters if one.name == name and revision in (None, one.revision))
    return next(found, None)


def _endpoint(server: WorkerState, request: Request, called: str | None) -> tuple[PlannedEndpoint, PlanFollower]:
    """Return the endpoint that ``called`` names, and the plan follower.

    Raises ``NotFound``, and ``InvalidField`` if the endpoint's model does not take adapters.
    """
    if server.follower is None:
        raise NotFound("this server has no store of endpoints")
    entity, _ = server.endpoints.seen_by(request.caller).route(called)
    if not entity.engine.info.capabilities.adapters:
        raise InvalidField("model", entity.endpoint, "an endpoint whose model accepts adapters")
    planned, _ = server.follower.planned(entity.endpoint)
    if planned is None:
        raise NotFound(f"endpoint {entity.endpoint} has just been deleted", param="model")
    return planned, server.follower


def _check_name(server: WorkerState, endpoint: PlannedEndpoint, name: str) -> None:
    """Raise ``RequestError`` or its subclass ``InvalidField`` if ``name`` is already used for something else."""
    if any(name in (entity.endpoint, entity.entity) for entity in server.endpoints.entities()):
        raise RequestError(f"The lora adapter name '{name}' conflicts with a served base model.", param="lora_name")
    if any(name in entity.config.model.bundle.adapters for entity in endpoint.entities):
        raise InvalidField("lora_name", name, "another name: the model was packaged with an adapter of this one")


def _check_on(server: WorkerState) -> tuple[str, ...]:
    places = server.settings.adapter_places
    if not places:
        raise PermissionDenied(
            "this server loads no adapters over HTTP; --adapter-sources names where they may come from"
        )
    return places


def check_allowed(server: WorkerState, uri: str) -> None:
    """Raise ``PermissionDenied`` if ``uri`` is not below one of ``adapter_sources``, whether it exists or not.

    Symbolic links are resolved, also those of the files in the directory.
    """
    places = _check_on(server)
    if uri.startswith(MODELS):
        named = parse(uri)
        if named is not None and any(fnmatch.fnmatchcase(f"{MODELS}{named.name}", place) for place in places):
            return
    elif os.path.isabs(uri) and "\0" not in uri:
        roots = [os.path.realpath(place) for place in places if not place.startswith(MODELS)]
        real = [os.path.realpath(os.path.join(uri, name)) for name in ("", CONFIG, WEIGHTS)]
        if any(all(path != root and os.path.commonpath((root, path)) == root for path in real) for root in roots):
            return
    raise PermissionDenied(
        "lora_path: adapters are loaded from adapter_sources only; this is none of them", param="lora_path"
    )


def source_path(server: WorkerState, uri: str, name: str) -> tuple[str, str]:
    """Return the adapter's directory, and the one of its tokenizer. Raises ``NotFound`` and ``RequestError``."""
    if not uri.startswith(MODELS):
        if not os.path.isfile(os.path.join(uri, CONFIG)):
            raise NotFound(f"Loading lora {name} failed: No adapter found for {uri}", param="lora_path")
        path = os.path.realpath(uri)
        return path, path
    if server.find_models is None:
        raise NotFound("this server has no registry to find models in", param="lora_path")
    try:
        (found,) = server.find_models((uri,))
    except (ModelNotFound, NotFound) as error:
        raise NotFound(f"Loading lora {name} failed: No adapter found for {uri}", param="lora_path") from error
    except PackagingError as error:
        raise RequestError(f"Loading lora {name} failed: {error}", param="lora_path") from error
    adapters = found.bundle.adapters
    chosen: Any = adapters.get(name) or (next(iter(adapters.values())) if len(adapters) == 1 else None)
    if chosen is None:
        has = ", ".join(sorted(adapters)) or "none"
        raise InvalidField(
            "lora_path", uri, f"a model logged with one adapter, or with one called {name!r}; it has {has}"
        )
    return str(chosen), found.bundle.tokenizer_dir


def own_template_of(
    server: WorkerState, endpoint: PlannedEndpoint, name: str, path: str, tokenizer_dir: str
) -> tuple[str, str]:
    """Return the chat template that the adapter has of its own ("" if none), and a note for the caller ("" if none).

    Raises ``RequestError`` if the template cannot be rendered, or if the adapter's tokenizer differs from the model's.
    """
    notes = []
    try:
        own = default_of(own_template(Path(path)))
        for entity in server.endpoints.entities():
            if entity.endpoint != endpoint.name:
                continue
            # on a thread, because reading a tokenizer takes long enough to hold up streams
            notes.append(server.offload(sys.maxsize, entity.view.text.check_adapter, name, own, tokenizer_dir))
    except PackagingError as error:
        raise RequestError(f"Loading lora {name} failed: {error}", param="lora_path") from error
    end = next(filter(None, notes), None)
    note = "" if end is None else f"Note: it {end}, whose generation_config has to name both (eos_token_id)."
    return own or "", note


ROUTES = (
    Route(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=with_body(load),
        summary="Load a LoRA adapter; it is ready when this call returns",
        dialect=DIALECTS["openai"],
        auth=Auth.MANAGE,
        body=LOAD,
        example={"lora_name": "formal", "lora_path": "/adapters/formal"},
        produces=("text/plain",),
    ),
    Route(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=with_body(unload),
        summary="Unload a LoRA adapter; running requests finish with it",
        dialect=DIALECTS["openai"],
        auth=Auth.MANAGE,
        body=UNLOAD,
        example={"lora_name": "formal"},
        produces=("text/plain",),
    ),
)
