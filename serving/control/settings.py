"""How a server listens, limits and drains; every value has a reasoned default."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from ..errors import InvalidField, PackagingError
from ..files import STATE_VARIABLE, xdg_dir
from ..settings import Bytes, Count, CountOrZero, PrefixSharing, Seconds, SecondsOrZero
from ..tasks.reply_size import MAX_REPLY_BYTES
from .listen_settings import ListenSettings, is_loopback

# asymmetric ones alone: the public keys of a set are no secrets to sign with
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
MODELS = "models:/"
Claim = Annotated[str, Meta(min_length=1, max_length=256, description="the name of a claim")]
DATABASE_VARIABLE = "MLFLOW_LLM_DATABASE"


class ServerSettings(ListenSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one server, its workers included; where it listens is in ``ListenSettings``.

    ``max_body_bytes`` bounds a request's body (413 above it),
    ``max_reply_bytes`` what a reply may have beside generated text (``tasks.reply_size``; a 400 before it runs).
    ``max_caller_bytes`` and ``max_held_bytes`` are what large requests of one key (or, without keys, one address) and
    of all may have in a worker's memory at once (``memory``; 429 and 503). ``refusals_per_minute``: 4xx a minute of a
    key or address in each worker before a 429 without a look at the request (``refusal_limit``), 0 for no end.
    ``max_queued`` is how many requests an endpoint may have waiting for its engine before new ones get a 503, and
    ``retry_after`` the seconds such an answer asks for. ``default_max_tokens`` is for requests without ``max_tokens``
    (what rate limits then reserve); None is up to the context length. ``adapter_sources`` are the directories below
    which, and the registered models (``models:/team-*``) of which, adapters may be loaded over HTTP, with commas
    between them; none: not at all. ``timeout`` (seconds) ends a request that asks for no shorter time.
    ``offload_bytes``: a body from this size on is decoded and tokenised on a thread, so that the event loop goes on
    serving streams; below it the switch costs more than it saves. ``drain_timeout`` (seconds) is what running
    requests get after SIGTERM. ``max_resolvers`` is how many processes look models up at once, in all workers
    together (200 MB each), and ``resolve_timeout`` (seconds) how long one may take, downloads included.
    ``scale_to_zero_after`` (seconds without a request) ends the engine of an entity with ``scale_to_zero_enabled``.
    ``engine_memory_budget`` (bytes) is what the engines of this machine may take together: idle ones are unloaded when
    another is wanted (``engine_memory``), None for no bound.
    ``engine_timeout`` (seconds) is how long requests wait for an engine of another host that is away.
    ``database`` is the URL of the store that holds
    keys and ledger; with ``require_keys`` a request without a key is refused. ``state_dir`` keeps what the ledger has
    not yet written to the store; None is the user's own (``default_state_dir``). ``trace_sample`` is the share of
    requests (0 to 1) traced to the MLflow experiment ``trace_experiment``, 0 none; ``trace_content`` puts prompts and
    replies into the traces. ``prefix_sharing``: see ``tasks.cache_salt``; an endpoint may have its own.

    ``jwt_jwks`` (a file or URL) has the keys that verify bearer tokens, which then are callers as API keys are: of
    ``jwt_issuer``, for ``jwt_audience``, signed in one of ``jwt_algorithms`` (commas between them), their times held to
    within ``jwt_leeway`` seconds. The claims ``jwt_…_claim`` name the caller, its tenant, its scopes,
    its endpoints and the weight that its turns have (``engine.tenants``; without such a claim it is 1).
    """

    workers: Annotated[int, Meta(ge=1, le=64)] = 2
    max_body_bytes: Bytes = 16 * 2**20
    max_reply_bytes: Bytes = MAX_REPLY_BYTES
    max_caller_bytes: Bytes = 32 * 2**20
    max_held_bytes: Bytes = 128 * 2**20
    refusals_per_minute: CountOrZero = 600
    max_queued: CountOrZero = 256
    retry_after: SecondsOrZero = 1.0
    default_max_tokens: Count | None = None
    adapter_sources: str = ""
    timeout: Seconds = 600.0
    offload_bytes: CountOrZero = 8 * 2**10
    drain_timeout: SecondsOrZero = 30.0
    max_resolvers: Annotated[int, Meta(ge=1, le=64)] = 2
    resolve_timeout: Seconds = 900.0
    scale_to_zero_after: Seconds = 300.0
    engine_memory_budget: Bytes | None = None
    engine_timeout: Seconds = 60.0
    database: str | None = None
    require_keys: bool = False
    state_dir: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    prefix_sharing: PrefixSharing = "tenant"
    trace_sample: Annotated[float, Meta(ge=0, le=1)] = 0.0
    trace_content: bool = False
    trace_experiment: str = "mlflow-llm"
    jwt_jwks: str | None = None
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_algorithms: str = "RS256,PS256,ES256,EdDSA,Ed25519"
    jwt_leeway: Annotated[float, Meta(ge=0, le=600)] = 30.0
    jwt_subject_claim: Claim = "sub"
    jwt_tenant_claim: Claim = "tenant"
    jwt_scope_claim: Claim = "scope"
    jwt_endpoints_claim: Claim = "endpoints"
    jwt_weight_claim: Claim | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_tokens()
        for place in self.adapter_places:
            if not place.startswith(("/", MODELS)) or place.rstrip("/") in ("", "models:"):
                raise InvalidField("adapter_sources", place, "a directory's absolute path, not /, or models:/name")
        if self.require_keys and self.database is None:
            raise InvalidField("require_keys", True, "false without --database, which has the keys")

    @property
    def adapter_places(self) -> tuple[str, ...]:
        """Each of ``adapter_sources``."""
        return tuple(place.strip() for place in self.adapter_sources.split(",") if place.strip())

    def _check_tokens(self) -> None:
        if self.jwt_jwks is None:
            if self.jwt_issuer is not None or self.jwt_audience is not None:
                raise InvalidField("jwt_jwks", None, "a file or URL with the keys that tokens are checked with")
            return
        for name in ("jwt_issuer", "jwt_audience"):
            if not getattr(self, name):
                raise InvalidField(name, getattr(self, name), "a text that every token has to have: iss, aud")
        place = urlsplit(self.jwt_jwks)
        if place.scheme == "http" and not is_loopback(place.hostname or ""):
            raise InvalidField("jwt_jwks", self.jwt_jwks, "a file or an https URL: over http anybody could send keys")
        for name in self.algorithms:
            if name not in ALGORITHMS:
                raise InvalidField("jwt_algorithms", name, "of " + ", ".join(ALGORITHMS))

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Those in which a token may be signed."""
        return tuple(name.strip() for name in self.jwt_algorithms.split(","))

    @property
    def asks_who(self) -> bool:
        """Whether a request without an API key or token is refused."""
        return self.require_keys or self.jwt_jwks is not None

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines may use it without a key."""
        return not self.asks_who and not is_loopback(self.host)


def default_state_dir() -> Path:
    """Where a user's servers keep what must outlive them: ``MLFLOW_LLM_STATE``, else in XDG's state directory."""
    if own := os.environ.get(STATE_VARIABLE):
        return Path(own).absolute()
    return Path(xdg_dir("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "mlflow-llm")


def ledger_dir(settings: ServerSettings) -> Path:
    """The ledger's part of the state directory, made where it is not there. Raises ``PackagingError`` where it cannot
    be written."""
    place = Path(settings.state_dir or default_state_dir(), "ledger").absolute()
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise PackagingError(
            f"the state directory {place} cannot be written ({error.strerror}); name another in {STATE_VARIABLE}"
        ) from None
