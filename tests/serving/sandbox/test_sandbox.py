"""Work on a model's text in processes that have limits."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from forks import check_fork

from mlflow_llm.serving.sandbox import Ended, Exceeded, Limits, NoProcess, Pool, Refused, Share
from mlflow_llm.serving.sandbox import pool as pools

LIMITS = Limits(seconds=0.5, memory=200 << 20, output=100_000)
MESSAGES = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def pool():
    made = Pool()
    yield made
    made.close()


def render(pool, source, limits=LIMITS, share=None, **variables):
    return pool.run(
        "render",
        limits,
        source=source,
        share=share,
        messages=MESSAGES,
        variables=variables,
        output=limits.output,
    )


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.5 seconds of CPU"),
        ("{{ (10**9)**(10**9) }}", "0.5 seconds of CPU"),
        ("{{ 'a' * 10**10 }}", "200 MiB of memory"),
        ("{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "MiB"),
        ("{{ 'a' * 100001 }}", "100000 characters of output"),
    ],
)
def test_limits_hold(pool, source, what):
    """Endless loops, one endless call into C, huge strings and long outputs are stopped, and named."""
    seconds = LIMITS.seconds if "seconds" in what else 60.0  # the others are reached first, on any machine
    with pytest.raises(Exceeded, match=what):
        render(pool, source, Limits(seconds=seconds, memory=LIMITS.memory, output=LIMITS.output))
    assert render(pool, PLAIN) == "user: Hi\n"


def test_what_templates_raise(pool):
    """A template's error comes back with its class, its text and, for a syntax error, its line."""
    with pytest.raises(Refused) as caught:
        render(pool, "\n{{ nothing( }}")
    assert (caught.value.kind, caught.value.line) == ("TemplateSyntaxError", 2)
    with pytest.raises(Refused, match="not today") as caught:
        render(pool, "{{ raise_exception('not today') }}")
    assert (caught.value.kind, caught.value.line) == ("TemplateError", None)
    with pytest.raises(Refused, match="recursion"):
        render(pool, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


def test_a_process_is_used_again(pool):
    """Requests, refusals and further templates of one after the other need one process."""
    for source in (PLAIN, PLAIN + "!", "{{ raise_exception('no') }}", PLAIN):
        with contextlib.suppress(Refused):
            render(pool, source)
    assert len(pool.processes) == 1


def test_any_text_goes_through(pool):
    """Texts beyond ASCII, half a surrogate pair and megabytes that fill the buffers come back as they were."""
    for text in ("größe 😀 \ud83d \x00", "é" * 3_000_000):
        found = pool.run(
            "render",
            Limits(seconds=60, memory=1 << 30, output=1 << 23),
            source="{{ messages[0].content }}",
            messages=[{"role": "user", "content": text}],
            variables={},
            output=1 << 23,
        )
        assert found == text


def test_children_that_somebody_else_waits_for(pool):
    """A process that reaps all its children (an event loop, SIGCHLD ignored) is told of limits all the same."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(Exceeded, match="CPU time"):
            render(pool, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
        pool.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_process_that_somebody_kills(pool):
    """Work whose process is killed, during or between requests, is done by another process."""
    render(pool, PLAIN)
    (process,) = pool.processes
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert render(pool, PLAIN) == "user: Hi\n"
    assert process not in pool.processes


def test_killed_again_and_again(pool, monkeypatch):
    """Work is given up after the second process that ends while doing it."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Ended):
        render(pool, PLAIN)
    assert not pool.processes
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(NoProcess, match="can be started"):
        render(pool, PLAIN)


def test_threads_share_a_few_processes(pool):
    """Sixteen threads get what each asked for, of at most four processes."""
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda i: render(pool, "{{ n }}" + PLAIN, n=i), range(200)))
    assert found == [f"{i}user: Hi\n" for i in range(200)]
    assert len(pool.processes) <= pools.NUM_PLACES


def test_models_leave_places_for_others(pool, monkeypatch):
    """While slow templates of many models hold all their places, a further request of one waits and another model's is
    answered; few processes are kept."""
    wait, arrived, go_on = threading.Event(), threading.Semaphore(0), pools.current_wait
    shares = [Share() for _ in range(pools.NUM_PLACES)]

    def held_up(fd, writing, seconds):
        if threading.current_thread() is not threading.main_thread():
            arrived.release()
            assert wait.wait(240)
        return go_on(fd, writing, seconds)

    monkeypatch.setattr(pools, "current_wait", held_up)
    with ThreadPoolExecutor(16) as threads:
        slow = [
            threads.submit(render, pool, PLAIN, share=share) for share in shares for _ in range(pools.PLACES_PER_MODEL)
        ]
        try:
            for _ in slow:
                assert arrived.acquire(timeout=240)
            monkeypatch.setattr(pools, "WAIT_SECONDS", 0.0)
            with pytest.raises(NoProcess, match="are busy"):
                render(pool, PLAIN, share=shares[0])
            assert render(pool, PLAIN, share=Share()) == "user: Hi\n"
        finally:
            wait.set()
        assert {one.result() for one in slow} == {"user: Hi\n"}
    assert len(pool.processes) <= pools.NUM_PLACES


def test_a_fork_has_processes_of_its_own(pool):
    """A forked process renders with its own, and leaves its parent's working."""
    assert render(pool, PLAIN) == "user: Hi\n"
    check_fork(pool, lambda: render(pool, PLAIN))


def test_it_ends_with_its_parent():
    """A killed process leaves no sandbox processes behind."""
    code = (
        "from mlflow_llm.serving.sandbox import POOL, render_limits; import os, signal\n"
        "POOL.run('reads', render_limits(0, None), source='x')\n"
        "print(next(iter(POOL.processes)).pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    pid = int(found.stdout)
    with contextlib.suppress(ProcessLookupError):
        watched = os.pidfd_open(pid)
        assert select.select([watched], [], [], 240.0)[0]
        os.close(watched)


def test_it_needs_little(pool):
    """A rendering process loads no torch, transformers, NumPy or Pillow, so that it is small and starts fast."""
    render(pool, PLAIN)
    (process,) = pool.processes
    with open(f"/proc/{process.pid}/maps") as maps:
        loaded = maps.read()
    assert "torch" not in loaded
    assert "numpy" not in loaded
    assert "PIL" not in loaded
    with open(f"/proc/{process.pid}/status") as status:
        (resident,) = (int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert resident < 40_000


def test_it_has_no_secrets(pool, monkeypatch):
    """The environment of a sandboxed process has only the variables that rendering needs."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    render(pool, PLAIN)
    (process,) = pool.processes
    with open(f"/proc/{process.pid}/environ") as environ:
        assert "sk-secret" not in environ.read()


def test_regular_expressions(pool):
    """Patterns match the end of a dotted name as in peft, the first match wins, and endless backtracking is stopped."""
    names = ["model.layers.0.q_proj", "model.layers.1.q_proj", "q_proj", "k_proj"]
    found = pool.run("match", LIMITS, patterns=[r"layers\.1\.q_proj", "q_proj"], names=names)
    assert found == [1, 0, 1, -1]
    with pytest.raises(Exceeded, match="CPU time"):
        pool.run("match", LIMITS, patterns=["(a+)+b"], names=["a" * 60])
    with pytest.raises(Refused):
        pool.run("match", LIMITS, patterns=["("], names=names)


def test_an_interrupted_request_takes_its_process_along(pool, monkeypatch):
    """An interrupted caller (a killed greenlet, Ctrl-C) ends the process it was using."""

    def interrupted(fd, writing, seconds):
        raise KeyboardInterrupt

    render(pool, PLAIN)
    monkeypatch.setattr(pools, "current_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render(pool, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    monkeypatch.undo()
    assert not pool.processes
    assert render(pool, PLAIN) == "user: Hi\n"


def test_the_loop_goes_on_meanwhile(pool):
    """A greenlet that waits for a slow template lets others run; a worker's thread beside it waits by itself."""
    code = (
        "import gevent.monkey; gevent.monkey.patch_all()\n"
        "import gevent, gevent.threadpool\n"
        "from mlflow_llm.serving.frontend import gevent_wait\n"
        "from mlflow_llm.serving.sandbox import POOL, Exceeded, Limits\n"
        "gevent_wait.install()\n"
        "def slow(_=None):\n"
        "    work = dict(messages=[], variables={}, output=9)\n"
        "    loop = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'\n"
        "    try: POOL.run('render', Limits(seconds=0.5, memory=1 << 28, output=9), source=loop, **work)\n"
        "    except Exceeded as error: return str(error)\n"
        "turns = []\n"
        "def ticks():\n"
        "    while True: turns.append(1); gevent.sleep(0.005)\n"
        "gevent.spawn(ticks)\n"
        "jobs = [gevent.spawn(slow), gevent.spawn(lambda: gevent.threadpool.ThreadPool(1).apply(slow))]\n"
        "gevent.joinall(jobs, raise_error=True)\n"
        "print(len(turns) > 5, *{job.value for job in jobs})\n"
        "large = dict(source='{{ messages[0].a }}', messages=[dict(a='a' * 2_000_000)], variables={}, output=1 << 22)\n"
        "limits = Limits(seconds=60, memory=1 << 28, output=1 << 22)\n"
        "def render(): return len(POOL.run('render', limits, **large))\n"
        "print(*gevent.threadpool.ThreadPool(2).map(lambda _: render(), range(4)), gevent.spawn(render).get())"
    )
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout == "True more than 0.5 seconds of CPU time\n" + " ".join(["2000000"] * 5) + "\n"


def test_places_are_given_back(pool):
    """After many failures on many threads every place is free again."""
    barrier = threading.Barrier(4)

    def fail(_):
        barrier.wait()
        with pytest.raises(Exceeded):
            render(pool, "{{ 'a' * 100001 }}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(fail, range(8)))
    with contextlib.ExitStack() as held:
        for _ in range(pools.NUM_PLACES):
            held.enter_context(pool.places.hold(0.0))
