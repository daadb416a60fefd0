"""Fixtures shared by all tests."""

from __future__ import annotations

import asyncio
import collections
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsers import chromium
from shared_servers import SERVERS, TOGETHER, SharedServers

if TYPE_CHECKING:  # xdist's controller loads this module too, and runs no tests
    from playwright.sync_api import Browser

    from mlflow_llm.serving.interface.bundle import Bundle

# A shell without job control, which is what runs many a CI, starts background commands with SIGINT ignored; every
# process of ours would inherit that, and the tests of Ctrl-C would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP, and a server inherits that

# Triton's kernels run in its interpreter where there is no GPU. It looks when it is first imported, whoever does that.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Clients (litellm) ask for the main thread's loop; before 3.14 that makes one, once, which nobody closes.
asyncio.set_event_loop(None)


LONG = {  # files of minutes, which begin before all others: none of them is then left over when the rest is done
    name: place
    for place, name in enumerate(
        (
            "test_readme.py",
            "test_remote_engine_weights.py",
            "test_flavor_real.py",
            "test_models_predict.py",
            "test_demo.py",
            "test_server_ending.py",
            "test_local_deployment.py",
            "test_management_sdk.py",
            "test_agent_clients.py",
            "test_openapi_server.py",
            "test_exactness.py",
            "test_deployment_commands.py",
            "test_models_serve.py",
            "test_server_recovery_smollm2.py",
            "test_two_stores.py",
            "test_server_faults.py",
            "test_remote_engines.py",
            "test_server_defaults.py",
            "test_engine_process.py",
            "test_server_start.py",
            "test_gateway_recipe.py",
        )
    )
}

CACHE = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()
DIED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Set a cache for the run, so that models packed by one test process are mapped by the others."""
    if not hasattr(config, "workerinput"):  # before xdist starts its workers, which inherit the environment
        config.stash[CACHE] = made = tempfile.TemporaryDirectory(prefix="mlflow-llm-", ignore_cleanup_errors=True)
        os.environ["MLFLOW_LLM_CACHE"] = made.name
    if not config.getoption("numprocesses", None):  # this process runs tests itself
        gc.disable()  # nothing of what it imports and collects is garbage: a seventh of that time
        import hypothesis

        # the time of an example depends on the machine
        slow = [hypothesis.HealthCheck.too_slow]
        hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
        hypothesis.settings.load_profile("any machine")


def pytest_unconfigure(config: pytest.Config) -> None:
    if CACHE in config.stash:
        config.stash[CACHE].cleanup()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Remember that a process of tests died, which pytest reports as the failure of one test."""
    if error:
        node.config.stash[DIED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit with another status than failed tests do if a process died: not all tests were run."""
    if session.config.stash.get(DIED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule by file (``--dist loadfile``), with files that share servers counted as one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file.rpartition("/")[2], file)

    return FilesTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail on duplicate ids, of which xdist runs only one, and put long files first in the otherwise random order."""
    assert len({item.nodeid for item in items}) == len(items), "two tests have one id"
    items.sort(key=lambda item: LONG.get(item.path.name, len(LONG)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop servers shared by files after the last test of those files."""
    servers = TOGETHER.get(item.path.name)
    if servers is not None and (nextitem is None or TOGETHER.get(nextitem.path.name) != servers):
        SERVERS.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze existing objects, because a garbage collection over all of them takes a second and tests ask for many."""
    gc.collect()
    gc.freeze()
    gc.enable()


MADE: dict[Any, list[Path]] = collections.defaultdict(list)  # directories by the fixture that asked for them
ASKING: list[Any] = []  # fixtures that are being set up, the innermost last


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Remove a fixture's directories with the fixture rather than at the end of the run, because models are hundreds of
    megabytes. Files of a shared server stay, since it outlives the fixture."""
    ASKING.append(fixturedef)
    try:
        return (yield)
    finally:
        ASKING.pop()


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    made = MADE.pop(fixturedef, [])
    if not request.session.testsfailed:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(exist_ok=True)  # keeps its name from being reused: MLflow caches stores by path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def directories_of_fixtures() -> Iterator[None]:
    real = pytest.TempPathFactory.mktemp

    def mktemp(factory: pytest.TempPathFactory, basename: str, numbered: bool = True) -> Path:
        path = real(factory, basename, numbered)
        if ASKING and "shared_servers" not in ASKING[-1].argnames:
            MADE[ASKING[-1]].append(path)
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.TempPathFactory, "mktemp", mktemp)
        yield


@pytest.fixture(scope="session")
def shared_servers(runtime_of_its_own: None) -> Iterator[SharedServers]:
    """Stop the remaining servers before their directory is removed."""
    yield SERVERS
    SERVERS.close()


@pytest.fixture(scope="session", autouse=True)
def runtime_of_its_own() -> Iterator[None]:
    """Use a runtime directory of its own: engines are shared by all processes of a user, also of parallel tests."""
    with (
        tempfile.TemporaryDirectory(prefix="mlflow-llm-", ignore_cleanup_errors=True) as place,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", place)
        patch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # four more processes of an MLflow server
        yield


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """Return a random Llama of two layers as the reference."""
    from tiny_models import FAMILIES, make_model

    return make_model(FAMILIES["llama"]())


@pytest.fixture(scope="session")
def tiny_bundle(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Save the same model to disk."""
    from tiny_models import save_bundle

    return save_bundle(tiny_llama, tmp_path_factory.mktemp("tiny_llama"))
