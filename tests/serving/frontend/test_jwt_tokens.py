"""Bearer tokens: which are taken, whom they stand for, and how their keys are kept."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import threading
import urllib.error
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from flask.testing import FlaskClient
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend import jwks
from mlflow_llm.serving.frontend.jwks import BadKeySet, KeySource, parsed
from mlflow_llm.serving.frontend.jwt_tokens import Tokens
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.errors import InvalidField, PermissionDenied, Unauthenticated, Unavailable
from mlflow_llm.serving.metering import Keys, Store
from mlflow_llm.serving.metering.accounts.accounts import Accounts
from mlflow_llm.serving.metering.accounts.authorization import Caller
from mlflow_llm.serving.metering.store import tables

NOW = 1_800_000_000
CLAIMS = {"iss": "https://idp", "aud": ["other", "llm"], "sub": "ann", "tenant": "acme", "exp": NOW + 60}
CLAIMS |= {"scope": "openid invoke"}
SETTINGS = {"jwt_jwks": "keys.json", "jwt_issuer": "https://idp", "jwt_audience": "llm"}


@pytest.fixture(scope="module")
def keys() -> dict[str, Any]:
    """Return a key of each algorithm, whose name is its id too."""
    return {
        "RS256": RSAKey.generate_key(2048, {"kid": "RS256"}),
        "ES256": ECKey.generate_key("P-256", {"kid": "ES256"}),
        "EdDSA": OKPKey.generate_key("Ed25519", {"kid": "EdDSA"}),
    }


def jwks_of(*found: Any) -> bytes:
    return json.dumps({"keys": [key.as_dict(private=False) for key in found]}).encode()


def signed(key: Any, algorithm: str, claims: dict[str, Any] | None = None, **header: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = {"alg": algorithm, "kid": key.kid} | header
        return jwt.encode(named, CLAIMS if claims is None else claims, key, algorithms=[algorithm])


@pytest.fixture
def tokens(keys: dict[str, Any]) -> Tokens:
    source = KeySource("keys.json", read=lambda place: (jwks_of(*keys.values()), jwks.MAX_AGE_SECONDS))
    return Tokens(ServerSettings(**SETTINGS), source, clock=lambda: NOW)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_token_is_a_caller(tokens: Tokens, keys: dict[str, Any], algorithm: str) -> None:
    """A token's claims give the caller's id, its tenant and its known scopes."""
    found = tokens.verify(signed(keys[algorithm], algorithm))
    assert found == Caller(key_id="jwt:ann", tenant="acme", scopes=("invoke",))


def test_claims_have_the_names_that_the_server_gives_them(keys: dict[str, Any]) -> None:
    """A claim is configured by name or dotted path and may be a list or a text; a long subject is still one caller."""
    names = {
        "jwt_subject_claim": "azp",
        "jwt_tenant_claim": "https://acme.example/tenant",
        "jwt_scope_claim": "realm_access.roles",
        "jwt_endpoints_claim": "models",
    }
    source = KeySource("keys.json", read=lambda place: (jwks_of(keys["RS256"]), jwks.MAX_AGE_SECONDS))
    tokens = Tokens(ServerSettings(**SETTINGS, **names), source, clock=lambda: NOW)
    claims = CLAIMS | {"azp": "x" * 500, "https://acme.example/tenant": "t", "models": "chat law:legal"}
    found = tokens.verify(signed(keys["RS256"], "RS256", claims | {"realm_access": {"roles": ["manage", "root"]}}))
    assert (found.tenant, found.scopes, found.endpoints) == ("t", ("manage",), ("chat", "law:legal"))
    assert found.key_id.startswith("jwt:xxx")
    assert len(found.key_id) < 128
    assert tokens.verify(signed(keys["RS256"], "RS256", claims)).scopes == ()
    other = {"roles": "invoke\u00a0manage usage"}  # only spaces separate scopes
    assert tokens.verify(signed(keys["RS256"], "RS256", claims | {"realm_access": other})).scopes == ("usage",)


@pytest.mark.parametrize(
    ("claim", "weight"), [(3, 3), (1000, 1000), ("7", 7), (None, 1), (0, 0), (1001, 0), (-1, 0), (True, 0), (2.0, 0),
                          ("1.5", 0), ("", 0), ("٣", 0), ("9" * 5000, 0), ([3], 0), ({"of": 3}, 0)],
)  # fmt: skip
def test_a_claim_weighs_its_callers_turns(keys: dict[str, Any], claim: Any, weight: int) -> None:
    """The configured claim gives a weight of 1 to 1000, 1 if absent; another value is refused, and without a configured
    claim it is ignored.
    """
    source = KeySource("keys.json", read=lambda place: (jwks_of(keys["EdDSA"]), jwks.MAX_AGE_SECONDS))
    token = signed(keys["EdDSA"], "EdDSA", changed(plan={"weight": claim}))
    named = Tokens(ServerSettings(**SETTINGS, jwt_weight_claim="plan.weight"), source, clock=lambda: NOW)
    if weight:
        assert named.verify(token).weight == weight
    else:
        with pytest.raises(Unauthenticated):
            named.verify(token)
    assert Tokens(ServerSettings(**SETTINGS), source, clock=lambda: NOW).verify(token).weight == 1


def changed(**claims: Any) -> dict[str, Any]:
    return {name: value for name, value in (CLAIMS | claims).items() if value is not None}


@pytest.mark.parametrize(
    "claims",
    [
        changed(iss="https://evil"),
        changed(iss=None),
        changed(aud="other"),
        changed(aud=None),
        changed(aud=[]),
        changed(exp=None),
        changed(exp="soon"),
        changed(exp=True),
        changed(nbf=NOW + 31),
        changed(iat=NOW + 31),
        changed(tenant=None),
        changed(tenant=""),
        changed(tenant=["acme"]),
        changed(tenant="x" * 129),
        changed(tenant="a\x00b"),
        changed(sub=None),
        changed(sub=7),
        changed(scope=7),
        changed(endpoints={"chat": True}),
        changed(endpoints=["a b"]),
    ],
)
def test_claims_that_are_refused(tokens: Tokens, keys: dict[str, Any], claims: dict[str, Any]) -> None:
    """Claims of another issuer or audience, without expiry, not yet valid or without subject get one and the same
    error.
    """
    with pytest.raises(Unauthenticated, match=r"^the token is not valid here$"):
        tokens.verify(signed(keys["RS256"], "RS256", claims))


def test_times_hold_within_the_leeway(tokens: Tokens, keys: dict[str, Any]) -> None:
    """Clocks may differ by half a minute, and the error of an expired token says so."""
    for claims in (changed(exp=NOW - 29), changed(nbf=NOW + 29), changed(iat=NOW + 29)):
        tokens.verify(signed(keys["RS256"], "RS256", claims))
    with pytest.raises(Unauthenticated, match="expired"):
        tokens.verify(signed(keys["RS256"], "RS256", changed(exp=NOW - 31)))


def unsigned(header: dict[str, Any], claims: dict[str, Any] = CLAIMS, signature: str = "") -> str:
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in (header, claims))
    return ".".join((*parts, signature))


def with_secret(secret: bytes) -> str:
    """Sign a token in HS256 under our key's id."""
    text = unsigned({"alg": "HS256", "kid": "RS256"}).rpartition(".")[0]
    signature = hmac.digest(secret, text.encode(), "sha256")
    return f"{text}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def test_forgeries(tokens: Tokens, keys: dict[str, Any]) -> None:
    """Forged tokens are refused: unsigned, with a public key as HMAC secret (algorithm confusion), another key, another
    key type, keys or URLs in the token, malformed parts.
    """
    rsa = keys["RS256"]
    stranger = RSAKey.generate_key(2048, {"kid": "RS256"})
    good = signed(rsa, "RS256")
    head, claims, signature = good.split(".")
    confused = [
        with_secret(secret) for secret in (rsa.as_pem(private=False), json.dumps(rsa.as_dict(private=False)).encode())
    ]
    forged = [
        *(unsigned({"alg": alg, "kid": "RS256"}) for alg in ("none", "None", "HS256", "", 7, None)),
        *confused,
        signed(stranger, "RS256"),
        signed(stranger, "RS256", jwk=stranger.as_dict(private=False)),
        signed(rsa, "RS512"),
        signed(rsa, "RS256", kid="ES256"),
        signed(rsa, "RS256", kid="unknown"),
        unsigned({"alg": "RS256", "kid": ["x"]}, signature=signature),
        unsigned({"alg": "RS256", "kid": "k" * 10_000}, signature=signature),
        unsigned({"alg": "RS256", "kid": "RS256", "crit": ["exp"]}, signature=signature),
        f"{head}.{claims}.",
        f"{head}.{claims}",
        f"{head}.{claims}.{signature[:-4]}AAAA",
        good + "." + good,
        "a.b.c",
        "..",
        "é.é.é",
        "x" * 9000,
        unsigned({"alg": "RS256", "kid": "RS256"}, signature="A" * 342),
    ]
    for token in forged:
        with pytest.raises(Unauthenticated, match=r"^the token is not valid here$"):
            tokens.verify(token)
    assert tokens.verify(good).key_id == "jwt:ann"


def test_keys_that_are_taken_out_of_a_set() -> None:
    """Secrets, weak, oversized, encryption and unknown keys of a set verify nothing; a malformed set is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weak = RSAKey.generate_key(1024, {"kid": "weak"}).as_dict(private=False)
    good = RSAKey.generate_key(2048).as_dict(private=True)
    others = [
        OctKey.generate_key(256, {"kid": "oct"}).as_dict(private=True),
        weak,
        {"kty": "RSA", "kid": "huge", "n": "A" * 5000, "e": "AQAB"},
        {"kty": "RSA", "kid": "bad", "n": 7, "e": "AQAB"},
        ECKey.generate_key("P-256", {"kid": "enc", "use": "enc"}).as_dict(private=False),
        {"kty": "EC", "kid": "no curve"},
        {"kty": "new", "kid": "new"},
        7,
    ]
    (found,) = parsed(json.dumps({"keys": [good, *others]}).encode()).values()
    assert not found.is_private
    for bad in (b"", b"[]", b"{}", b'{"keys": 7}', b"\xff", b'{"keys": [' + b"7," * 100 + b"7]}", b"[" * 100_000):
        with pytest.raises(BadKeySet):
            parsed(bad)


class Issuer:
    """A key set that changes and counts its downloads."""

    def __init__(self, *keys: Any) -> None:
        self.keys, self.asked, self.now, self.max_age = keys, 0, 0.0, jwks.MAX_AGE_SECONDS
        self.source = KeySource("https://idp/keys", read=self.read, clock=lambda: self.now)

    def read(self, place: str) -> jwks.Fetched:
        self.asked += 1
        if not self.keys:
            raise OSError("away")
        return jwks_of(*self.keys), self.max_age


def test_a_new_key_is_found_and_bad_names_fetch_nothing(keys: dict[str, Any]) -> None:
    """Unknown key ids cause one download in ten seconds, and a new key of the issuer is found with the next."""
    issuer = Issuer(keys["RS256"])
    issuer.source.find("RS256")
    for number in range(1000):
        with pytest.raises(Unauthenticated):
            issuer.source.find(f"bad-{number}")
    assert issuer.asked == 1
    issuer.keys = (keys["RS256"], keys["ES256"])
    issuer.now = jwks.RETRY_SECONDS
    assert issuer.source.find("ES256").kid == "ES256"
    with pytest.raises(Unauthenticated):
        issuer.source.find("bad")
    with pytest.raises(Unauthenticated):
        issuer.source.find(None)  # without an id two keys are ambiguous
    assert issuer.asked == 2


def test_an_old_set_is_renewed_beside_the_requests(keys: dict[str, Any]) -> None:
    """An old set is renewed in the background while requests use it; after a long outage of the issuer it is not used
    any more.
    """
    issuer = Issuer(keys["RS256"])
    issuer.source.find("RS256")
    renewed = threading.Event()
    read = issuer.source.read

    def watched(place: str) -> jwks.Fetched:
        try:
            return read(place)
        finally:
            renewed.set()

    issuer.source.read = watched
    issuer.now, issuer.keys = jwks.MAX_AGE_SECONDS, ()
    assert issuer.source.find("RS256").kid == "RS256"
    assert renewed.wait(240)
    with issuer.source.turn:
        assert issuer.asked == 2
    issuer.now = jwks.STALE_SECONDS
    with pytest.raises(Unavailable):
        issuer.source.find("RS256")


def test_a_set_is_kept_as_long_as_its_answer_says(keys: dict[str, Any]) -> None:
    """A key set is cached for the time its Cache-Control header gives, within fixed bounds."""
    issuer = Issuer(keys["RS256"])
    issuer.max_age = 1000.0
    issuer.source.find("RS256")
    issuer.now = 999.0
    issuer.source.find("RS256")
    assert issuer.asked == 1
    minimum, maximum = jwks.FRESHNESS
    for headers, seconds in (
        (("",), jwks.MAX_AGE_SECONDS),
        (("public",), jwks.MAX_AGE_SECONDS),
        (("public, Max-Age=600",), 600.0),
        (('max-age="600", must-revalidate', "200"), 400.0),
        (("max-age=600", "soon"), 600.0),
        (("max-age=0",), minimum),
        (("max-age=31536000",), maximum),
        (("max-age=" + "9" * 5000,), maximum),
        (("max-age=-1",), jwks.MAX_AGE_SECONDS),
        (("no-cache",), minimum),
        (("max-age=600, no-store",), minimum),
    ):
        assert jwks.freshness(*headers) == seconds, headers


def test_an_issuer_that_is_away_is_a_503(keys: dict[str, Any]) -> None:
    """If the issuer is unavailable requests are a 503 with Retry-After, and it is not asked again earlier."""
    issuer = Issuer()
    for _ in range(5):
        with pytest.raises(Unavailable) as refused:
            issuer.source.find("RS256")
        assert refused.value.retry_after == jwks.RETRY_SECONDS
    assert issuer.asked == 1
    issuer.keys, issuer.now = (keys["RS256"],), jwks.RETRY_SECONDS
    assert issuer.source.find("RS256").kid == "RS256"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, headers, body = self.server.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_set_is_downloaded_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key set is downloaded; redirects, errors and answers that are too large are refused."""
    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), Answers) as server, contextlib.ExitStack() as ending:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        ending.callback(thread.join)
        ending.callback(server.shutdown)  # also after a failure: the thread would run for ever
        url = f"http://127.0.0.1:{server.server_port}/keys"
        server.answer = (200, {}, b'{"keys": []}')
        assert jwks.download(url) == (b'{"keys": []}', jwks.MAX_AGE_SECONDS)
        server.answer = (200, {"Cache-Control": "public, max-age=60", "Age": "20"}, b'{"keys": []}')
        assert jwks.download(url) == (b'{"keys": []}', 40.0)
        for status, headers, body in (
            (302, {"Location": "file:///etc/passwd"}, b""),
            (302, {"Location": url}, b""),
            (404, {}, b""),
        ):
            server.answer = (status, headers, body)
            with pytest.raises(urllib.error.HTTPError, match=str(status)) as refused:
                jwks.download(url)
            assert refused.value.fp.closed  # else its connection stays open until the error is collected
        server.answer = (200, {}, b"x" * (jwks.MAX_BYTES + 1))
        with pytest.raises(BadKeySet):
            jwks.download(url)


def test_over_http(make: Callable[..., WorkerState], tokens: Tokens, keys: dict[str, Any]) -> None:
    """A valid token runs requests within its scopes; an invalid one is a 401 without details, a missing scope a 403."""
    client: FlaskClient = create_app(make(tokens=tokens)).test_client()

    def ask(path: str, token: str | None) -> Any:
        return client.get(path, headers={} if token is None else {"Authorization": f"Bearer {token}"})

    token = signed(keys["ES256"], "ES256")
    assert ask("/v1/models", token).status_code == 200
    for bad in (None, "sk-" + "x" * 40, token[:-4] + "AAAA", unsigned({"alg": "none"})):
        refused = ask("/v1/models", bad)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert ask("/api/2.0/keys", token).status_code == 403
    with pytest.raises(PermissionDenied):
        tokens.verify(token).check_scope("usage")


def test_the_tenant_of_copies_is_no_callers(
    make: Callable[..., WorkerState], sqlite_url: str, tokens: Tokens, keys: dict[str, Any]
) -> None:
    """A token or a key of the tenant ``shadow``, under which copies of requests are counted, is refused by that name on
    every route that needs a caller, and is nobody on one that does not."""
    store = Store(sqlite_url)
    secret, _ = Keys(store).create("acme")
    store.write(lambda c: c.execute(sa.insert(tables.tenants).values(tenant="shadow", created_ms=0)))
    store.write(lambda c: c.execute(sa.update(tables.api_keys).values(tenant="shadow")))
    client: FlaskClient = create_app(make(tokens=tokens, keys=Keys(store))).test_client()
    for bearer in (signed(keys["ES256"], "ES256", changed(tenant="shadow")), secret):
        headers = {"Authorization": f"Bearer {bearer}"}
        for path in ("/v1/models", "/api/2.0/endpoints"):
            refused = client.get(path, headers=headers)
            assert (refused.status_code, "the tenant 'shadow' is not a caller's" in refused.text) == (403, True)
        asked = client.post("/v1/chat/completions", json={"messages": []}, headers=headers)
        assert (asked.status_code, "'shadow'" in asked.text) == (403, True)
        assert client.get("/health", headers=headers).status_code == 200
    for scope in ("tenant", "tenant_user"):
        with pytest.raises(InvalidField, match="subject"):
            Accounts(store).set_limits({"scope": scope, "subject": "shadow", "limits": {"qpm": 1}})
    store.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"jwt_issuer": None}, "jwt_issuer"),
        ({"jwt_audience": ""}, "jwt_audience"),
        ({"jwt_jwks": None}, "jwt_jwks"),
        ({"jwt_jwks": "http://idp.example/keys"}, "jwt_jwks"),
        ({"jwt_algorithms": "RS256,none"}, "jwt_algorithms"),
        ({"jwt_algorithms": "HS256"}, "jwt_algorithms"),
        ({"jwt_leeway": 3600.0}, "jwt_leeway"),
        ({"jwt_tenant_claim": ""}, "jwt_tenant_claim"),
    ],
)
def test_settings_that_would_take_too_much(changes: dict[str, Any], field: str) -> None:
    """Settings that would accept any issuer or audience, symmetric algorithms or keys over plain HTTP are refused."""
    with pytest.raises(InvalidField, match=f"^{field}: "):
        ServerSettings(**(SETTINGS | changes))


def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    """A key file without keys is refused at the start, before models are loaded."""
    file = tmp_path / "keys.json"
    words = ["serve", "-m", "x", "--jwt-issuer", "i", "--jwt-audience", "a", "--jwt-jwks", str(file)]
    for text in (None, "no json", '{"keys": []}'):
        if text is not None:
            file.write_text(text)
        done = CliRunner().invoke(cli, words)
        assert (done.exit_code, f"--jwt-jwks {file}: " in done.stderr) == (1, True), done.output
