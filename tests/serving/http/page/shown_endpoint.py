"""Endpoints of several served models, as the management API shows them."""

from __future__ import annotations

from typing import Any


def two_models(**state: str) -> dict[str, Any]:
    """Return an endpoint of two served models, as the management API shows it."""
    entities = [
        {"name": f"model-{n}", "entity_name": "assistant", "entity_version": str(n), "state": {}, "content_hash": "x"}
        for n in (1, 2)
    ]
    routes = [{"served_model_name": f"model-{n}", "served_entity_name": f"model-{n}", "traffic_percentage": share}
              for n, share in ((1, 90), (2, 10))]  # fmt: skip
    models = [{"name": f"model-{n}", "model_name": "assistant", "model_version": str(n)} for n in (1, 2)]
    config = {"config_version": 3, "served_entities": entities, "served_models": models}
    config["traffic_config"] = {"routes": routes, "sticky": True}
    shown = {"ready": "READY", "config_update": "NOT_UPDATING"} | state
    return {"name": "assistant", "state": shown, "config": config}


def with_shadow(name: str = "candidate") -> dict[str, Any]:
    """Return the endpoint of two served models with a third one, which gets copies of a quarter of the requests, and a
    fourth, a canary of the first with 5 % of the traffic."""
    shown = two_models()
    config = shown["config"]
    shadow = {"sample": 0.25, "max_queued": 100, "max_concurrent": 4}
    more = {"entity_name": "assistant", "entity_version": "3", "state": {}, "content_hash": "y"}
    config["served_entities"] += [
        {"name": name, "shadow": shadow} | more,
        {"name": "model-1~3-00ff", "canary_of": "model-1"} | more,
    ]
    config["traffic_config"]["routes"][0]["traffic_percentage"] = 85
    config["traffic_config"]["routes"].append(
        {"served_model_name": "model-1~3-00ff", "served_entity_name": "model-1~3-00ff", "traffic_percentage": 5}
    )
    return shown
