"""An endpoint of two served models, as the management API shows it."""

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
