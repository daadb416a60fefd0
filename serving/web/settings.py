"""How a server listens, limits and drains; every value has a reasoned default."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct


class ServerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one server, its workers included.

    ``host`` is loopback unless told otherwise. ``max_body_bytes`` bounds a request's body (413 above it).
    ``max_queued`` is how many requests an endpoint may have waiting for its engine before new ones get a 503, and
    ``retry_after`` the seconds such an answer asks for. ``default_max_tokens`` is for requests without ``max_tokens``
    (what rate limits then reserve); None is up to the context length. ``timeout`` (seconds) ends a request that asks
    for no shorter time. ``io_timeout`` (seconds) ends a connection whose client neither sends nor takes a byte for so
    long: what a slow reader can make us hold is then bounded. ``offload_bytes``: a body from this size on is decoded
    and tokenised on a thread, so that the event loop goes on serving streams; below it the switch costs more than it
    saves. ``drain_timeout`` (seconds) is what running requests get after SIGTERM. ``scale_to_zero_after`` (seconds
    without a request) ends the engine of an entity with ``scale_to_zero_enabled``. ``engine_timeout`` (seconds) is
    how long requests wait for an engine of another host that is away. ``database`` is the URL of the store that holds
    keys and ledger; with ``require_keys`` a request without a key is refused. ``state_dir`` keeps what the ledger has
    not yet written to the store; None is the user's own (``default_state_dir``). ``trace_sample`` is the share of
    requests (0 to 1) traced to the MLflow experiment ``trace_experiment``, 0 none; ``trace_content`` puts prompts and
    replies into the traces.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 2
    max_body_bytes: int = 16 * 2**20
    max_queued: int = 256
    max_connections: int = 1000
    retry_after: float = 1.0
    default_max_tokens: int | None = None
    timeout: float = 600.0
    io_timeout: float = 30.0
    offload_bytes: int = 8 * 2**10
    drain_timeout: float = 30.0
    scale_to_zero_after: float = 300.0
    engine_timeout: float = 60.0
    database: str | None = None
    require_keys: bool = False
    state_dir: str | None = None
    log_level: str = "info"
    trace_sample: float = 0.0
    trace_content: bool = False
    trace_experiment: str = "mlflow-llm"


def default_state_dir() -> Path:
    """Where a user's servers keep what must outlive them (XDG's state directory)."""
    root = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(root, "mlflow-llm")
