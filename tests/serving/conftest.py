"""Real stores: a SQLite file a test; PostgreSQL where a server binary is installed."""

from __future__ import annotations

import dataclasses
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from instant_model import write_instant_model
from postgres_databases import new_database
from serving_process import GATED_CORE, Running, running
from shared_servers import SharedServers

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend.worker_state import WorkerState, make_server
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.modes import Mode
from mlflow_llm.serving.routing.admission import profile_in
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints, ServedEntity
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView, Profile
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.testing.instant_engine import InstantEngine

PARTS = ("keys", "tokens", "ledger", "tracer", "endpoint_store", "prompts", "payloads")  # of a server


def _binaries() -> Path | None:
    on_path = shutil.which("initdb")
    found = [Path(on_path).parent] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((path for path in reversed(found) if (path / "initdb").exists()), None)


def _as_server_user(command: list[str]) -> None:
    """Switch to the user ``postgres`` if the tests run as root, since PostgreSQL refuses root."""
    user = None
    if os.getuid() == 0:
        user = "postgres"
    subprocess.run(command, check=True, capture_output=True, user=user, group=user, extra_groups=[] if user else None)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a PostgreSQL server of the tests' own, without a database name."""
    pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server is not installed (apt-get install postgresql)")
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL refuses root and there is no user postgres to run it as")
    base = Path(subprocess.run(["mktemp", "-d"], check=True, capture_output=True, text=True).stdout.strip())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if os.getuid() == 0:
        shutil.chown(base, "postgres", "postgres")
    data = str(base / "data")
    _as_server_user([str(binaries / "initdb"), "-D", data, "-U", "test", "-A", "trust", "-E", "UTF8", "--no-sync"])
    flags = f"-p {port} -k {base} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=200"
    start = [str(binaries / "pg_ctl"), "-D", data, "-l", str(base / "log"), "-w", "-o", flags, "start"]
    _as_server_user(start)
    try:
        yield f"postgresql+psycopg://test@127.0.0.1:{port}"
    finally:
        _as_server_user([str(binaries / "pg_ctl"), "-D", data, "-w", "-m", "immediate", "stop"])
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/metering.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Return a new store's URL, once for each of the two databases."""
    if request.param == "sqlite":
        return request.getfixturevalue("sqlite_url")
    return new_database(request.getfixturevalue("postgres_server"))


@pytest.fixture(scope="session")
def instant_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_instant_model(tmp_path_factory.mktemp("instant"))


@pytest.fixture(scope="session")
def instant_text(instant_bundle: Bundle) -> TextModel:
    return TextModel(instant_bundle)


@pytest.fixture(scope="module")
def observed(shared_servers: SharedServers, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Yield a real server that no test harms: two workers, 2 ms a step, replies in printable ASCII that never end
    early.
    """
    bundle = write_instant_model(tmp_path_factory.mktemp("observed"), step_delay=0.002, vocab_size=94)
    return shared_servers.get("observed", lambda: running(bundle, workers=2))


@pytest.fixture(scope="session")
def make(instant_bundle: Bundle, instant_text: TextModel) -> Callable[..., WorkerState]:
    """Return ``make(keys=…, mode=…, ledger=…, **server_settings)``, which makes a server with one endpoint,
    ``assistant``.
    """

    def build(mode: Mode | None = None, **options: object) -> WorkerState:
        parts = {name: options.pop(name) for name in PARTS if name in options}
        engine = InstantEngine(instant_bundle, EngineSettings(max_model_len=4096))
        view = EndpointView(
            name="assistant",
            info=engine.info,
            text=instant_text,
            adapters=lambda: tuple(a.name for a in engine.adapters()),
            names=("model-1",),
            profile=profile_in(mode, Profile()),
        )
        endpoint = ServedEntity(endpoint="assistant", entity="model-1", view=view, engine=engine, mode=mode, created=1)
        return dataclasses.replace(make_server(ServedEndpoints(endpoint), ServerSettings(**options)), **parts)

    return build


@pytest.fixture
def server(make: Callable[..., WorkerState]) -> WorkerState:
    return make()


@pytest.fixture
def client(server: WorkerState) -> FlaskClient:
    return create_app(server).test_client()


@pytest.fixture(scope="module")
def unsteady(shared_servers: SharedServers, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Yield a server of two workers whose engine takes 10 ms a step and counts as hanging after 4 s without one."""
    bundle = write_instant_model(tmp_path_factory.mktemp("unsteady"), step_delay=0.01)
    settings = EngineSettings(idle_timeout=0.3, stall_timeout=4.0)
    return shared_servers.get("unsteady", lambda: running(bundle, workers=2, engine=settings))


@pytest.fixture(scope="module")
def fast(shared_servers: SharedServers, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Yield a server of one worker that takes bodies of 1 MiB and waits 5 s for a stalled client; its engine never
    waits.
    """
    bundle = write_instant_model(tmp_path_factory.mktemp("fast"), max_model_len=10**7)
    return shared_servers.get("fast", lambda: running(bundle, io_timeout=5.0, max_body_bytes=2**20))


@pytest.fixture(scope="module")
def deliberate(shared_servers: SharedServers, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Yield a server of one worker; its engine takes 150 ms a step, runs two of at most four requests, loads in 1 s and
    its steps may be held back.
    """
    bundle = write_instant_model(tmp_path_factory.mktemp("deliberate"), step_delay=0.15, load_delay=1.0)
    settings = EngineSettings(idle_timeout=0.3, max_num_seqs=2, max_queued_requests=4)
    options = {"core": GATED_CORE, "engine": settings, "max_queued": 3}
    return shared_servers.get("deliberate", lambda: running(bundle, **options))
