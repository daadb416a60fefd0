"""OpenVINO Model Server's routes about its models: the lists below ``/v3`` and the status of its configuration."""

from __future__ import annotations

from collections.abc import Mapping

from ...dialects import DIALECTS
from ...dialects.openai.reply_types import ModelCard, ModelList
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Request
from ...frontend.worker_state import WorkerState
from ...routing.served_endpoints import ServedEntity
from ..route import Route
from .info_routes import get_model, list_models
from .reply_types import ModelState, ModelStates, VersionState, VersionStatus

# an engine's state in the terms of TensorFlow Serving, which OpenVINO Model Server uses
_STATES: Mapping[str, ModelState] = {
    "ready": "AVAILABLE",
    "starting": "LOADING",
    "draining": "UNLOADING",
}
_FINE: VersionStatus = {"error_code": "OK", "error_message": "OK"}
_AWAY: VersionStatus = {"error_code": "UNAVAILABLE", "error_message": "no engine of this model answers"}


def config(server: WorkerState, request: Request) -> Answer:
    """Return each model with its versions and their states."""
    found: ModelStates = {}
    for entity in server.endpoints.seen_by(request.caller).entities():
        found.setdefault(entity.endpoint, {"model_version_status": []})["model_version_status"].append(_status(entity))
    return json_answer(found)


def _status(entity: ServedEntity) -> VersionState:
    state = _STATES.get(entity.engine.health().status, "END")
    fine = state in ("AVAILABLE", "LOADING")
    return {"version": entity.version, "state": state, "status": _FINE if fine else _AWAY}


_OPENVINO = DIALECTS["openvino"]

ROUTES = (
    Route(
        method="GET",
        path="/v3/models",
        handler=list_models,
        reply=ModelList,
        summary="Models and their adapters",
        dialect=_OPENVINO,
    ),
    Route(
        method="GET",
        path="/v3/models/<path:name>",
        handler=get_model,
        reply=ModelCard,
        summary="One model",
        dialect=_OPENVINO,
    ),
    Route(
        method="GET",
        path="/v1/config",
        handler=config,
        reply=ModelStates,
        summary="Served models with their versions and states",
        dialect=_OPENVINO,
    ),
)
