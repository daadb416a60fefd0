"""MLflow's scoring server, as far as it must be known: whether we run in it, how many callers it lets in at once, and
what it makes of a request. MLflow's private names of the server are used here alone.

It answers each request in the event loop's default executor, which asyncio makes at the first request with the number
of cores and four more threads: on two cores six callers enter ``predict`` and the others wait while the engine has
room. The loop does not run yet when the model is loaded, and neither MLflow nor uvicorn has a setting for it.
"""

from __future__ import annotations

import concurrent.futures
import os
from typing import Any

from mlflow.pyfunc import scoring_server


def is_scoring_server() -> bool:
    """Whether this process is a worker of ``mlflow models serve``."""
    return scoring_server._SERVER_MODEL_PATH in os.environ


def keep_requests_whole() -> None:
    """Leave the fields of a request in OpenAI's form in the request, in this process.

    The server would move those that the signature lists as ``params`` out of it and hold them to MLflow's types: its
    refusals repeat the whole prompt, ours name the field.
    """
    scoring_server._split_data_and_params_for_llm_input = lambda request, params_schema: (request, {})


def admit(callers: int) -> None:
    """Let ``callers`` requests into ``predict`` at once, by the size of the executor that asyncio will make for itself.

    Replaces the name asyncio looks up, in this process, for executors that bear asyncio's own prefix and no size.
    """
    plain = concurrent.futures.ThreadPoolExecutor

    class Executor(plain):  # type: ignore[misc, valid-type]
        def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "", *rest: Any) -> None:
            if max_workers is None and thread_name_prefix == "asyncio":
                max_workers = callers
            super().__init__(max_workers, thread_name_prefix, *rest)

    concurrent.futures.ThreadPoolExecutor = Executor  # type: ignore[misc, assignment]
