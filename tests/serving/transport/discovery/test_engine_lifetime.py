"""Starting, sharing and ending of engine processes, which leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from processes import gone
from transport_place import SETTINGS, by_sequence, completion, eventually, timeless

from mlflow_llm.serving.interface.errors import EngineDied, PackagingError, Unavailable
from mlflow_llm.serving.interface.events import Failed, Finished
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport.discovery.launcher import Launcher, engine_key
from mlflow_llm.serving.transport.discovery.state_directory import StateDirectory


def test_remote_equals_local(place, make_bundle):
    """An engine process gives exactly the events of the same engine in this process, and leaves nothing."""
    bundle = make_bundle()
    with place.connect(bundle) as engine:
        here = InstantEngine(bundle).submit(completion(n=3))
        assert timeless(engine.submit(completion(n=3))) == timeless(here)
        assert engine.info.pid == place.engines()[0].pid != os.getpid()
        assert engine.health().status == "ready"
    place.assert_clean()


def test_files_are_private(place, make_bundle):
    """Runtime directory, state directory and socket are private to the user, and others' are refused."""
    bundle = make_bundle()
    with place.connect(bundle) as engine:
        state = engine.io.finder.state
        for path in (place.runtime, state.path, state.clients_dir, state.socket_path):
            assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
        os.chmod(place.runtime, 0o755)
        with pytest.raises(Unavailable, match="not private"):
            place.connect(bundle)
        os.chmod(place.runtime, 0o700)
    place.assert_clean()


@pytest.mark.parametrize("count", [2, 8])
def test_many_starters_one_engine(place, make_bundle, count):
    """Processes that start at once share one engine with one pid."""
    bundle = make_bundle(load_delay=0.3)
    code = "print(engine.info.pid, flush=True); list(engine.submit(request(5))); sys.stdin.readline()"
    children = [place.run(code, bundle) for _ in range(count)]
    pids = {child.stdout.readline().strip() for child in children}
    assert pids == {str(place.engines()[0].pid)}
    assert len(place.engines()) == 1
    for child in children:
        child.kill()
    place.assert_clean()


@pytest.mark.parametrize(
    "ending",
    ["engine.close()", "pass", "raise ValueError", "os.kill(os.getpid(), 9)", "os._exit(0)"],
)
def test_client_ends(place, make_bundle, ending):
    """However a client ends, with a request running, its engine ends too and nothing is left."""
    code = f"stream = engine.submit(request(10**6)); next(stream); print('on', flush=True)\n{ending}"
    child = place.run(code, make_bundle(step_delay=0.002))
    assert child.stdout.readline().strip() == "on"
    child.wait(240)
    place.assert_clean()


def test_killed_client_frees_its_sequences(place, make_bundle):
    """kill -9 of one client aborts its sequences alone; the other client's go on."""
    bundle = make_bundle(step_delay=0.02, max_model_len=10**7)  # so slow that no stream is soon paused
    with place.connect(bundle) as engine:
        code = "stream = engine.submit(request(10**6)); next(stream); print('on', flush=True); time.sleep(600)"
        child = place.run(code, bundle)
        assert child.stdout.readline().strip() == "on"
        stream = engine.submit(completion(max_tokens=10**6))
        assert eventually(lambda: engine.health().num_running == 2)
        child.kill()
        assert eventually(lambda: engine.health().num_running == 1)
        next(stream)
        stream.close()
        assert eventually(lambda: engine.health().num_running == 0)
    place.assert_clean()


def test_dropped_stream_is_aborted(place, make_bundle):
    """An unreferenced stream is aborted without being closed."""
    with place.connect(make_bundle(step_delay=0.002)) as engine:
        stream = engine.submit(completion(max_tokens=10**6))
        next(stream)
        del stream
        assert eventually(lambda: engine.health().num_running == 0 and engine.health().steps > 0)
    place.assert_clean()


def test_terminated_engine(place, make_bundle):
    """After SIGTERM an engine runs until its last client has gone, and then ends at once, whatever its idle_timeout."""
    lasting = msgspec.structs.replace(SETTINGS, idle_timeout=600.0)
    bundle, request = make_bundle(step_delay=0.002), completion(max_tokens=100)
    expected = by_sequence(InstantEngine(bundle).submit(request))
    with place.connect(bundle, lasting) as engine:
        pid = engine.info.pid
        stream = engine.submit(request)
        first = next(stream)
        os.kill(pid, signal.SIGTERM)
        assert by_sequence([first, *stream]) == expected
        assert by_sequence(engine.submit(request)) == expected
        assert engine.info.pid == pid
    place.assert_clean()


def test_an_engine_terminated_twice(place, make_bundle):
    """A second SIGTERM ends running requests with shutting_down and leaves nothing; the next request starts anew."""
    with place.connect(make_bundle(step_delay=0.002)) as engine:
        pid = engine.info.pid
        stream = engine.submit(completion(max_tokens=10**6))
        os.kill(pid, signal.SIGTERM)
        kinds = []
        for event in stream:  # signals that are sent at once may arrive as one
            kinds += [event.kind] if isinstance(event, Failed) else []
            if not gone(pid):
                os.kill(pid, signal.SIGTERM)
        assert kinds == ["shutting_down"]
        assert isinstance(list(engine.submit(completion(max_tokens=3)))[-1], Finished)
        assert engine.info.pid != pid
    place.assert_clean()


def test_both_killed(place, make_bundle):
    """The next start of any engine removes what a killed engine and its killed client left."""
    child = place.run("print(engine.info.pid, flush=True); time.sleep(600)", make_bundle())
    pid = int(child.stdout.readline())
    child.kill()
    os.kill(pid, signal.SIGKILL)
    child.wait(240)
    # the lock and not the process list: a dying process has lost its command line before it lets go of its files
    (left,) = [name for name in os.listdir(place.runtime) if "." not in name]
    assert eventually(lambda: not StateDirectory(place.runtime, left).engine_alive)
    with place.connect(make_bundle(vocab_size=50)):
        assert len([name for name in os.listdir(place.runtime) if "." not in name]) == 1
    place.assert_clean()


def test_killed_idle_engine(place, make_bundle):
    """A client whose idle engine was killed cleans up after it."""
    with place.connect(make_bundle()) as engine:
        os.kill(engine.info.pid, signal.SIGKILL)
        assert eventually(lambda: not engine.io.finder.alive())
    place.assert_clean()


def test_bad_model_fails_all_waiting(place, make_bundle, tmp_path):
    """A model that cannot be loaded raises the short reason in every process that waits, and nothing is left."""
    bundle = make_bundle()
    (tmp_path / "model" / "instant.json").write_text('{"vocab_size": "many"}')
    with ThreadPoolExecutor(4) as pool:
        failures = [future.exception() for future in [pool.submit(place.connect, bundle) for _ in range(4)]]
    assert all(isinstance(error, PackagingError) and "vocab_size" in str(error) for error in failures), failures
    place.assert_clean()


def test_killed_while_loading(place, make_bundle):
    """An engine killed while it loads is an error that says so, at once."""
    bundle = make_bundle(load_delay=30.0)
    killer = threading.Thread(target=lambda: eventually(place.engines) and place.engines()[-1].kill())
    killer.start()
    with pytest.raises(EngineDied, match=r"cannot be started|killed while it loaded"):
        place.connect(bundle)
    killer.join()
    place.assert_clean()


@pytest.mark.parametrize(
    ("log", "free", "said"),
    [
        ("", 1 << 30, "the engine was killed while it loaded (out of memory?): its log is empty"),
        ("loading weights\n", 1 << 30, "the engine was killed while it loaded (out of memory?): loading weights"),
        ("a\nOSError: [Errno 9] x\n", 1 << 30, "the engine ended while it loaded: OSError: [Errno 9] x"),
        ("libgomp: Thread creation failed: x\n", 1 << 30, "the engine ended while it loaded: libgomp: Thread cre"),
        ("loading weights\n", 9, "the engine ended while it loaded: no space is left in {runtime} (TMPDIR); loading"),
    ],
)
def test_why_an_engine_ended_while_it_loaded(tmp_path, make_bundle, monkeypatch, log, free, said):
    """The error guesses at memory only if neither the log nor the disk gives a reason."""
    launcher = Launcher(make_bundle(), EngineSettings(), state_dir=str(tmp_path / "run"))
    lock = launcher.state.lock()
    launcher.state.prepare()
    lock.release()
    Path(launcher.state.file("engine.log")).write_text(log)
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=free))
    assert launcher.why_killed().startswith(said.format(runtime=launcher.state.runtime))


def test_start_timeout(place, make_bundle):
    """An engine that is not ready in time is killed."""
    import msgspec

    with pytest.raises(EngineDied, match="start_timeout"):
        place.connect(make_bundle(load_delay=30.0), msgspec.structs.replace(SETTINGS, start_timeout=1.0))
    place.assert_clean()


def test_progress(place, make_bundle):
    """The caller hears when the model loads and when it is ready."""
    said = []
    with place.connect(make_bundle(load_delay=0.2), progress=said.append):
        assert said == ["loading", "ready"]
    place.assert_clean()


def test_forked_child_is_a_client_of_its_own(place, make_bundle):
    """A forked child opens its own connection, to the same engine, and its parent's stays whole."""
    code = """
        first = engine.submit(request(50, "a")); next(first)
        pid = os.fork()
        if pid == 0:
            mine = len(list(engine.submit(request(5, "b")))); rest = list(first)
            os._exit(mine if rest[0].kind == "aborted" else 99)
        got = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(got, len(list(first)), engine.info.pid, flush=True)
        """
    child = place.run(code, make_bundle(step_delay=0.002))
    out, err = child.communicate(timeout=240)
    assert out.split()[:2] == ["6", "50"], err
    place.assert_clean()


def test_threads_share_a_client(place, make_bundle):
    """Sixteen threads submit at once and each gets its own tokens."""
    bundle = make_bundle()
    local = InstantEngine(bundle)
    with place.connect(bundle) as engine, ThreadPoolExecutor(16) as pool:
        prompts = [(i, i + 1) for i in range(64)]
        got = list(pool.map(lambda p: timeless(engine.submit(completion(prompt=p))), prompts))
        assert got == [timeless(local.submit(completion(prompt=p))) for p in prompts]
    place.assert_clean()


def test_an_interpreter_by_another_name_shares_the_engine(place, make_bundle, monkeypatch):
    """``python`` and ``python3.11`` of one environment share an engine; another environment or interpreter does not."""
    bundle = make_bundle()
    folder, prefix, real = Path(sys.executable).parent, sys.prefix, os.path.realpath(sys.executable)
    keys = []
    for executable, environment in (
        (folder / "python", prefix),
        (folder / f"python3.{sys.version_info.minor}", prefix),
        (folder / "python", f"{prefix}-other"),
        ("/bin/sh", prefix),
    ):
        assert os.path.realpath(executable) == real or executable == "/bin/sh"
        monkeypatch.setattr(sys, "executable", str(executable))
        monkeypatch.setattr(sys, "prefix", environment)
        keys.append(engine_key(bundle, EngineSettings()))
    monkeypatch.undo()
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_removed_directory(place, make_bundle):
    """An engine whose directory was removed ends all the same."""
    with place.connect(make_bundle()):
        shutil.rmtree(place.runtime)
    place.assert_clean()


def test_a_directory_removed_under_a_stream(place, make_bundle):
    """An engine whose directory is removed ends at once, and another continues its requests."""
    bundle = make_bundle(step_delay=0.02)
    expected = by_sequence(InstantEngine(bundle).submit(completion(max_tokens=120)))
    with place.connect(bundle) as engine:
        pid = engine.info.pid
        stream = engine.submit(completion(max_tokens=120))
        begin = [next(stream) for _ in range(5)]
        shutil.rmtree(place.runtime)
        assert by_sequence([*begin, *stream]) == expected
        assert eventually(lambda: gone(pid))
        assert engine.info.pid == place.engines()[0].pid != pid
        assert len(place.engines()) == 1
    place.assert_clean()
