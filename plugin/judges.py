"""Judges of ``mlflow.genai`` by ``endpoints:/name``.

MLflow passes the model of ``make_judge`` to litellm, which has no provider ``endpoints`` (MLflow 3.17, litellm 1.9x).
This module adds one, whose endpoints are those of MLflow's deployments target.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PROVIDER = "endpoints"


def use_endpoints() -> None:
    """Make ``make_judge(…, model="endpoints:/name")`` call the endpoint ``name`` of MLflow's deployments target.

    The target is set by ``mlflow.deployments.set_deployments_target`` or MLFLOW_DEPLOYMENTS_TARGET. Needs litellm.
    Calling this again changes nothing.
    """
    litellm: Any = import_module("litellm")
    custom: Any = import_module("litellm.llms.custom_llm")
    from mlflow.deployments import get_deploy_client, get_deployments_target
    from mlflow.exceptions import MlflowException

    class Endpoints(custom.CustomLLM):  # type: ignore[misc,name-defined,unused-ignore]
        def completion(self, model: str, messages: list[Any], optional_params: dict[str, Any], **_: Any) -> Any:
            asked = {k: v for k, v in optional_params.items() if v is not None and k != "max_retries"}  # litellm's own
            form = asked.get("response_format")
            if isinstance(form, type):
                asked["response_format"] = litellm.utils.type_to_response_format_param(form)
            said = [
                message if isinstance(message, dict) else message.model_dump(exclude_none=True) for message in messages
            ]
            client = get_deploy_client(get_deployments_target())
            try:
                reply = client.predict(endpoint=model, inputs={"messages": said, **asked})
            except MlflowException as error:
                raise custom.CustomLLMError(status_code=error.get_http_status_code(), message=error.message) from error
            return litellm.ModelResponse(**reply)

    others = [entry for entry in litellm.custom_provider_map if entry["provider"] != PROVIDER]
    litellm.custom_provider_map = [*others, {"provider": PROVIDER, "custom_handler": Endpoints()}]
    litellm.utils.custom_llm_setup()
