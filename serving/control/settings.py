"""How a server listens, limits and drains; every value has a reasoned default."""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from ..endpoints.config import PlacementSetting
from ..endpoints.scale import Runtime, Scale
from ..interface.errors import InvalidField, PackagingError, without_password
from ..interface.settings import NAME, Bytes, Count, CountOrZero, PrefixSharing, Seconds, SecondsOrZero
from ..system.files import STATE_VARIABLE, xdg_dir
from ..tasks.reply_size import MAX_REPLY_BYTES
from .listen_settings import ListenSettings, is_loopback

# only asymmetric algorithms: the public keys of a key set are no secrets, so they must not serve as signing keys
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
HEADER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$"
MODELS = "models:/"
MAX_URL = 1024  # characters of a webhook's URL
Claim = Annotated[str, Meta(min_length=1, max_length=256, description="the name of a claim")]
NAME_PATTERN = rf"^({NAME.pattern})$"
Alias = Annotated[str, Meta(min_length=1, max_length=256)]
Target = Annotated[str, Meta(pattern=rf"^({NAME.pattern})(:[^:]{{1,256}})?$")]
Aliases = Annotated[dict[Alias, Target], Meta(description="names, each with an endpoint or endpoint:adapter")]
NO_HOSTS = "on a server without --database, which hosts join, and --engine-key-file, the key of their engines"
DATABASE_VARIABLE = "MLFLOW_LLM_DATABASE"


class ServerSettings(ListenSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one server and its workers; ``ListenSettings`` has its addresses and connections.

    Attributes:
        workers: gateway processes.
        max_body_bytes: the largest body of a request; larger ones get a 413.
        max_reply_bytes: the most bytes that a reply may have besides generated text; a request for more gets a 400
            before it runs.
        max_caller_bytes: bytes that large requests of one key (without keys, of one address) may hold in a worker's
            memory at once; more get a 429. Their decoded images may hold eight times as many.
        max_held_bytes: bytes that large requests of all callers may hold in a worker's memory at once; more get a 503.
            Decoded images may hold eight times as many.
        refusals_per_minute: 4xx answers per minute to a key or address, in each worker, after which requests get a 429
            without being looked at. 0 means no limit.
        max_queued: requests that may wait for the engine of an endpoint; more get a 503.
        retry_after: seconds in the ``Retry-After`` of such a 503.
        default_max_tokens: ``max_tokens`` of requests without it, which is also what rate limits reserve for them. None
            is the rest of the context.
        model_aliases: further names of models for clients that have one built in, each with the endpoint or
            ``endpoint:adapter`` that answers: ``{"gpt-4o": "assistant"}``. ``*`` and ``?`` in a name match any
            characters. A served endpoint of that name comes first.
        default_endpoint: the endpoint of requests that name no model. None is the only endpoint there is.
        adapter_sources: directories below which, and registered models (``models:/team-*``) from which, adapters may be
            loaded over HTTP, separated by commas. Empty allows none.
        timeout: seconds that a request may take, unless it sets a shorter time.
        stream_start_after: seconds after which a streamed reply begins even if it has no text yet. Until then an error
            has its own HTTP status; afterwards it is an event of the stream.
        stream_keep_alive: seconds between signs of life in such a stream until its first text.
        offload_bytes: bodies of at least this size are decoded and tokenised on a thread, so that the event loop keeps
            serving streams. For smaller ones the switch costs more than it saves.
        drain_timeout: seconds that running requests have after SIGTERM.
        max_resolvers: processes that look up models at once, in all workers together (200 MB each).
        resolve_timeout: seconds that such a lookup may take, including downloads.
        alias_poll: seconds between two looks at MLflow's registry for aliases that endpoints follow.
        scale_to_zero_after: seconds without a request after which the engine of an entity with
            ``scale_to_zero_enabled`` ends.
        engine_memory_budget: bytes that the engines of this machine may take together. Idle engines are unloaded when
            another one is needed. None means no limit.
        placement: where the engines of endpoints run that do not say it: "local", each gateway's on its own host, or
            "hosts", on hosts that have joined the database (``mlflow-llm engine --join``).
        runtime: the cluster that starts hosts for the engines of endpoints that do not say where they run; every
            gateway needs its client, since any may lead. None starts none by itself.
        ray_address: address of the Ray cluster that starts such hosts. None is what Ray takes by itself: RAY_ADDRESS,
            or a cluster on this host, or else a new one, which ends with this server.
        engine_key_file: file with the key of engines on joined hosts.
        engine_timeout: seconds that requests wait for an unavailable engine on another host.
        database: URL of the database with keys, limits, ledger and endpoints.
        max_clock_skew: seconds that the clock of this host may differ from the database's; by more, the server does not
            start, and admits nothing.
        end_user_header: header in which keys with the scope ``end_users`` name the end user whose limits apply,
            in place of the request's own ``user``. None is no header.
        guardrail_scorers: scorers (``module:name``) that the guardrails of endpoints may use, separated by commas.
        require_keys: refuse requests without an API key; needs a database.
        batch_concurrency: requests of batches that a worker runs at once. 0 runs none here.
        max_batch_rows: the most requests of one batch.
        max_open_batch_rows: requests of batches that have not ended, of one tenant; more batches get a 429.
        max_file_storage: bytes of files that one tenant may have; more get a 429.
        max_adapter_storage: bytes of adapters, loaded at run time, that the database may have.
        state_dir: directory for what the ledger has not written to the database yet. None is the user's own.
        webhook_urls: URLs that are told of rollouts, separated by commas. Empty tells nobody.
        webhook_secret_file: file, readable by its owner only, with the secret that signs what they are sent.
        budget_alert_at: shares of budgets, separated by commas, at which webhooks are told, such as ``0.5,0.8,1``; each
            once a day, month or budget.
        page: serve the page under ``/``.
        log_level: the least severe level that is logged.
        log_file: file to which the log is appended as JSON, besides standard error.
        prefix_sharing: who shares cached prompt prefixes: the keys of a tenant, all callers of an endpoint, or nobody.
            An endpoint may have its own setting.
        trace_sample: share of requests that are traced, from 0 (none) to 1.
        trace_content: include prompts and replies in traces.
        trace_experiment: the MLflow experiment for traces.
        jwt_jwks: file or URL of the key set (JWKS) that verifies bearer tokens. Their callers are treated like those
            with API keys.
        jwt_issuer: the required issuer (``iss``) of tokens.
        jwt_audience: the required audience (``aud``) of tokens.
        jwt_algorithms: allowed signature algorithms, separated by commas.
        jwt_leeway: seconds by which clocks may differ when the times of a token are checked.
        jwt_subject_claim: claim that names the caller.
        jwt_tenant_claim: claim that names the tenant.
        jwt_scope_claim: claim with the scopes.
        jwt_endpoints_claim: claim with the allowed endpoints; without the claim, all are allowed.
        jwt_weight_claim: claim with the weight of the caller's turns in an engine; without the claim it is 1.
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
    model_aliases: Aliases = {}  # noqa: RUF012 - msgspec copies it
    default_endpoint: Annotated[str, Meta(pattern=NAME_PATTERN)] | None = None
    adapter_sources: str = ""
    timeout: Seconds = 600.0
    stream_start_after: SecondsOrZero = 10.0
    stream_keep_alive: Seconds = 15.0
    offload_bytes: CountOrZero = 8 * 2**10
    drain_timeout: SecondsOrZero = 30.0
    max_resolvers: Annotated[int, Meta(ge=1, le=64)] = 2
    resolve_timeout: Seconds = 900.0
    alias_poll: Seconds = 60.0
    scale_to_zero_after: Seconds = 300.0
    engine_memory_budget: Bytes | None = None
    placement: PlacementSetting = "local"
    runtime: Runtime | None = None
    ray_address: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    engine_key_file: str | None = None
    engine_timeout: Seconds = 60.0
    database: str | None = None
    max_clock_skew: Seconds = 60.0
    end_user_header: Annotated[str, Meta(pattern=HEADER_PATTERN)] | None = None
    guardrail_scorers: str = ""
    require_keys: bool = False
    batch_concurrency: CountOrZero = 8
    max_batch_rows: Count = 50_000
    max_open_batch_rows: Count = 200_000
    max_file_storage: Bytes = 2**30
    max_adapter_storage: Bytes = 2**32
    state_dir: str | None = None
    webhook_urls: str = ""
    webhook_secret_file: str | None = None
    budget_alert_at: str = ""
    page: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_file: str | None = None
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
        self._check_webhooks()
        for place in self.adapter_places:
            if not place.startswith(("/", MODELS)) or place.rstrip("/") in ("", "models:"):
                raise InvalidField("adapter_sources", place, "a directory's absolute path, not /, or models:/name")
        if self.require_keys and self.database is None:
            raise InvalidField("require_keys", True, "false without --database, which has the keys")
        if self.placement == "hosts" and not self.has_hosts:
            raise InvalidField("placement", "hosts", f"'local' {NO_HOSTS}")
        if self.runtime is not None and not self.has_hosts:
            raise InvalidField("runtime", self.runtime, f"none {NO_HOSTS}")
        if self.runtime is not None and (lacking := lacks_runtime(self.runtime)):
            raise InvalidField("runtime", self.runtime, lacking)
        if self.ray_address is not None and not self.has_hosts:
            raise InvalidField("ray_address", self.ray_address, f"none {NO_HOSTS}")

    @property
    def has_hosts(self) -> bool:
        """Whether engines may be placed on hosts that have joined the database."""
        return self.database is not None and self.engine_key_file is not None

    @property
    def engine_placement(self) -> PlacementSetting:
        """The place of engines of endpoints that do not say where these run."""
        return self.placement if self.runtime is None else "hosts"

    @property
    def engine_scale(self) -> Scale | None:
        """The hosts that a runtime starts for the engines of endpoints that do not say where they run."""
        return None if self.runtime is None else Scale(runtime=self.runtime)

    @property
    def adapter_places(self) -> tuple[str, ...]:
        """The entries of ``adapter_sources``."""
        return tuple(place.strip() for place in self.adapter_sources.split(",") if place.strip())

    @property
    def webhooks(self) -> tuple[str, ...]:
        """The entries of ``webhook_urls``, each once."""
        return tuple(dict.fromkeys(url.strip() for url in self.webhook_urls.split(",") if url.strip()))

    @property
    def alert_shares(self) -> tuple[float, ...]:
        """The entries of ``budget_alert_at``. Raises ``InvalidField``."""
        if not self.budget_alert_at:
            return ()
        from ..metering.accounts.alert_shares import parse_shares  # with SQL, which commands do without

        return parse_shares("budget_alert_at", self.budget_alert_at)

    def _check_webhooks(self) -> None:
        if self.alert_shares and not self.webhooks:
            raise InvalidField("budget_alert_at", self.budget_alert_at, "none without webhook_urls")
        if self.alert_shares and self.database is None:
            raise InvalidField(
                "budget_alert_at", self.budget_alert_at, "none without --database, which has the budgets"
            )
        for url in self.webhooks:
            try:
                place = urlsplit(url)
                well = place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
            except ValueError:  # a port that is no number
                well = False
            if (
                not well
                or place.username is not None
                or len(url) > MAX_URL
                or not url.isascii()
                or not url.isprintable()
            ):
                allowed = f"http and https URLs of at most {MAX_URL} characters, without a user"
                raise InvalidField("webhook_urls", without_password(url), allowed)
        if self.webhooks and not self.webhook_secret_file:
            raise InvalidField("webhook_secret_file", None, "a file with the secret that signs events for webhook_urls")
        if self.webhook_secret_file and not self.webhooks:
            raise InvalidField("webhook_secret_file", self.webhook_secret_file, "none without webhook_urls")

    def _check_tokens(self) -> None:
        if self.jwt_jwks is None:
            if self.jwt_issuer is not None or self.jwt_audience is not None:
                raise InvalidField("jwt_jwks", None, "a file or URL with the keys that verify tokens")
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
        """The algorithms that a token may be signed with."""
        return tuple(name.strip() for name in self.jwt_algorithms.split(","))

    @property
    def asks_who(self) -> bool:
        """Whether a request without an API key or token is refused."""
        return self.require_keys or self.jwt_jwks is not None

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines may use the server without a key."""
        return not self.asks_who and not is_loopback(self.host)


def lacks_runtime(runtime: Runtime) -> str:
    """Return what to do where the client of ``runtime`` is not installed; "" where it is. Does not import it."""
    if importlib.util.find_spec(runtime) is not None:
        return ""
    return f"a runtime that is installed on every gateway: pip install 'mlflow-llm[{runtime}]'"


def default_state_dir() -> Path:
    """Return where a user's servers keep data that must outlive them.

    This is ``MLFLOW_LLM_STATE``, or else a directory in XDG's state directory. Raises ``OSError`` for a user without a
    home directory: a directory below the working directory would not be found again from another one.
    """
    if own := os.environ.get(STATE_VARIABLE):
        return Path(own).absolute()
    try:
        return (xdg_dir("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "mlflow-llm"
    except RuntimeError:
        raise OSError(f"this user has no home directory; {STATE_VARIABLE} names a state directory") from None


def gateway_name(settings: ServerSettings) -> str:
    """Return what operators call this server among the gateways of its database."""
    return f"{socket.gethostname()}:{settings.socket or settings.port}"[:256]


def ledger_dir(settings: ServerSettings) -> Path:
    """Return the ledger's part of the state directory, which is created if missing.

    Raises ``PackagingError`` if it cannot be written, or found.
    """
    try:
        state = settings.state_dir or default_state_dir()
    except OSError as error:
        raise PackagingError(str(error)) from None
    place = Path(state, "ledger").absolute()
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise PackagingError(
            f"the state directory {place} cannot be written ({error.strerror}); name another in {STATE_VARIABLE}"
        ) from None
