"""The process that asks MLflow's prompt registry one question.

``python -m mlflow_llm.serving.control.mlflow_processes.prompt_process FD`` reads the question, a JSON object,
from the file descriptor ``FD`` and prints the answer or the error as a line of JSON. A process of its own keeps MLflow,
whose client waits for minutes, out of the server's processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ...interface.errors import PackagingError, without_password
from ..mlflow_resolver import end_with_parent

HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # unless the operator set others
MAX_VERSIONS = 100
CODES = {
    "RESOURCE_DOES_NOT_EXIST": "missing",
    "NOT_FOUND": "missing",
    "INVALID_PARAMETER_VALUE": "invalid",
    "RESOURCE_ALREADY_EXISTS": "conflict",
}
Answer = dict[str, Any]


def search(*, words: str = "", limit: int) -> Answer:
    """Return the prompts whose names contain ``words``, and whether there are more than ``limit``."""
    import mlflow

    filtered = f"name ILIKE '%{words}%'" if words else None
    found = mlflow.genai.search_prompts(filter_string=filtered, max_results=limit + 1)
    prompts = [{"name": one.name, "description": _text(one.description)} for one in found]
    return {"prompts": prompts[:limit], "more": len(prompts) > limit}


def load(*, name: str, version: str = "") -> Answer:
    """Return a version of a prompt: by its number, by an alias, or the newest."""
    import mlflow

    called = f"{name}/{version}" if version.isdecimal() else f"{name}@{version or 'latest'}"
    return _version(mlflow.genai.load_prompt(f"prompts:/{called}", link_to_model=False))


def save(**given: Any) -> Answer:
    """Save a new version, and return it; ``given`` are arguments of ``register_prompt``."""
    import mlflow

    return _version(mlflow.genai.register_prompt(**given))


def _version(found: Any) -> Answer:
    from mlflow import MlflowClient

    versions = MlflowClient().search_prompt_versions(found.name, max_results=MAX_VERSIONS)
    return {
        "name": found.name,
        "version": int(found.version),
        "template": found.template,
        "variables": sorted(found.variables),
        "commit_message": _text(found.commit_message),
        "response_format": found.response_format,
        "model_config": found.model_config,
        "versions": [
            {
                "version": int(one.version),
                "commit_message": _text(one.commit_message),
                "created_ms": one.creation_timestamp,
            }
            for one in versions
        ],
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value != "None" else ""  # MLflow writes an absent description as "None"


CALLS: Mapping[str, Callable[..., Answer]] = {"search": search, "load": load, "save": save}


def answer(question: Mapping[str, Any]) -> Answer:
    """Return the answer, or ``{"error", "kind"}``; ``kind`` is "missing", "invalid", "conflict" or "unavailable"."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from pydantic import ValidationError

    from mlflow_llm.flavors.llm.model.model_registry import check_store

    try:
        check_store("the prompt registry", mlflow.get_registry_uri())
        return CALLS[question["call"]](**question["arguments"])
    except PackagingError as error:
        return {"error": str(error), "kind": "unavailable"}
    except MlflowException as error:
        return {"error": without_password(error.message), "kind": CODES.get(error.error_code, "unavailable")}
    except ValidationError as error:  # of ``model_config``
        first = error.errors()[0]
        place = ".".join(map(str, ("model_config", *first["loc"])))
        return {"error": f"{place}: {first['msg']}, not {first['input']!r}"[:300], "kind": "invalid"}
    except Exception as error:  # of a store's driver: a database or host that does not answer
        return {"error": without_password(f"{type(error).__name__}: {error}"), "kind": "unavailable"}


def main(words: list[str]) -> int:
    with os.fdopen(int(words[0]), encoding="utf-8") as file:
        question = json.load(file)
    os.environ.update({name: value for name, value in HTTP.items() if name not in os.environ})
    print(json.dumps(answer(question)))
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
