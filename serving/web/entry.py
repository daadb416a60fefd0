"""Where MLflow meets the server: model URIs become bundles. The only module of the server that imports MLflow.

``python -m mlflow_llm.serving.web.entry URI…`` runs in a process of its own and prints one JSON object: the server's
own processes need no MLflow, whose import would cost each of them seconds and a few hundred megabytes.
"""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
from msgspec import Struct

from ..bundle import Bundle
from ..errors import PackagingError


class Resolved(Struct, frozen=True, kw_only=True):
    """``config`` is the saved ``model_config`` (engine settings among it)."""

    bundle: Bundle
    config: dict[str, object] = {}


def resolve(uris: tuple[str, ...]) -> tuple[Resolved, ...]:
    """The bundles of model URIs or local directories. Raises ``PackagingError``."""
    command = [sys.executable, "-m", "mlflow_llm.serving.web.entry", *uris]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    lines = done.stdout.decode().strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise PackagingError(f"reading the model failed with exit status {done.returncode}") from None
    if "error" in answer:
        raise PackagingError(answer["error"])
    return msgspec.convert(answer["models"], tuple[Resolved, ...])


def main(uris: list[str]) -> int:
    from mlflow.exceptions import MlflowException

    from mlflow_llm.flavors import llm
    from mlflow_llm.flavors.llm.resolve import load_bundle_from, saved_config

    try:
        found = []
        for uri in uris:
            root = llm.resolve._local(uri)
            found.append(Resolved(bundle=load_bundle_from(root), config=saved_config(root)))
    except (MlflowException, PackagingError, OSError) as error:
        print(json.dumps({"error": str(error)[:500]}))
        return 1
    print(json.dumps({"models": msgspec.to_builtins(found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
