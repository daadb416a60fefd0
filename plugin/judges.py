"""Judges of ``mlflow.genai`` by ``endpoints:/name``.

MLflow passes the model of ``make_judge`` to litellm, which has no provider ``endpoints`` (MLflow 3.17, litellm 1.9x).
This module adds one when litellm is imported, whose endpoints are those of MLflow's deployments target
(docs/decisions/0019).
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from . import late_import

logger = logging.getLogger(__name__)
PROVIDER = "endpoints"
ADAPTER = "mlflow.genai.judges.adapters.litellm_adapter"
CAPABILITIES = "_MODEL_RESPONSE_FORMAT_CAPABILITIES"  # MLflow's: which models take a response_format, by litellm's name


def use_endpoints() -> None:
    """Make ``make_judge(…, model="endpoints:/name")`` call the endpoint ``name`` of MLflow's deployments target.

    The target is set by ``mlflow.deployments.set_deployments_target`` or MLFLOW_DEPLOYMENTS_TARGET. Needs litellm.
    It is called when litellm is imported, and only needed again by who replaces ``litellm.custom_provider_map``.
    """
    litellm: Any = import_module("litellm")
    custom: Any = import_module("litellm.llms.custom_llm")

    class Endpoints(custom.CustomLLM):  # type: ignore[misc,name-defined,unused-ignore]
        def completion(self, model: str, messages: list[Any], optional_params: dict[str, Any], **_: Any) -> Any:
            from mlflow.deployments import get_deploy_client, get_deployments_target
            from mlflow.exceptions import MlflowException

            asked = {k: v for k, v in optional_params.items() if v is not None and k != "max_retries"}  # litellm's own
            form = asked.get("response_format")
            if form is None:
                forget_failures(f"{PROVIDER}/{model}")
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
    forget_failures(f"{PROVIDER}/")


def forget_failures(prefix: str) -> None:
    """Make MLflow ask for the type of a verdict again, of the models whose names in litellm begin with ``prefix``.

    After any request that is refused, MLflow asks once more without ``response_format``, and never again with it for
    that model, so that one wrong parameter leaves all later verdicts to chance.
    """
    capabilities = getattr(sys.modules.get(ADAPTER), CAPABILITIES, {})
    for name in [name for name in capabilities if name.startswith(prefix)]:
        capabilities.pop(name, None)


def add_provider(_: Any) -> None:
    """Add the provider to litellm. A litellm that cannot take it is left as it is."""
    try:
        use_endpoints()
    except Exception as error:  # the program that imports litellm may have no judge
        logger.warning("judges cannot use endpoints:/… through this version of litellm: %s", error)


def install() -> None:
    """Add the provider, now or when litellm is imported."""
    late_import.when_imported("litellm", add_provider)
