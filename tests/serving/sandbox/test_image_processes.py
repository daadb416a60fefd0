"""Confined processes for images: raw bytes in and out, nothing else of the machine within reach."""

import io
import os
import signal
import sys

import pytest
from forks import check_fork
from PIL import Image

from mlflow_llm.serving.sandbox import IMAGES, POOL, Ended, Exceeded, Limits, Pool, Refused, decode_limits
from mlflow_llm.serving.sandbox import child as script
from mlflow_llm.serving.sandbox import process as processes

MAX_BYTES = 1 << 20
CHILD = """
import os, socket, sys
sys.argv[1:] = sys.argv[1:2]
exec(compile(open({path!r}).read().replace('if __name__ == "__main__":', 'if False:'), "child", "exec"))

def tries(data):
    _pillow()
    found = []
    for do in (lambda: open("/etc/passwd"), lambda: open("/proc/self/maps"), lambda: os.pipe(), lambda: os.dup(0),
               lambda: socket.socket(), lambda: os.listdir("/"), lambda: os._exit(0) if os.fork() == 0 else os.wait(),
               lambda: os.open(".", os.O_PATH)):
        try:
            do()
            found.append("")
        except OSError as error:
            found.append(error.strerror)
    return found

def echo(data, times=1):
    return Raw(len(data), data * times)

def dies(data):
    os.kill(os.getpid(), {signal})

WORK |= {{"tries": tries, "echo": echo, "dies": dies}}
main()
"""


def encoded(size=(5, 4), format="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, (1, 2, 3)).save(file, format=format)
    return file.getvalue()


@pytest.fixture
def pool():
    made = Pool(2)
    yield made
    made.close()


@pytest.fixture
def changed(pool, monkeypatch, tmp_path):
    """Return a pool whose processes can do more work than images."""

    def make(died=signal.SIGSEGV):
        made = tmp_path / "child.py"
        made.write_text(CHILD.format(path=script.__file__, signal=int(died)))
        monkeypatch.setattr(processes, "__file__", str(made))
        return pool

    return make


def image(pool, data=None, limits=None, maximum=MAX_BYTES):
    data = encoded() if data is None else data
    return pool.run("image", limits or decode_limits(maximum, len(data)), data=data, maximum=maximum)


def test_raw_bytes(changed):
    """Raw bytes of any number are passed in and returned unchanged, one request after the other."""
    pool = changed()
    for size in (1, 65535, 65536, 65537, 10_000_001):
        data = os.urandom(min(size, 1 << 20)) * (size // min(size, 1 << 20)) + bytes(size % min(size, 1 << 20))
        limits = Limits(seconds=60.0, memory=1 << 30, output=100, raw=2 * size)
        assert pool.run("echo", limits, data=data, times=2) == (len(data), data * 2)
    assert len(pool.processes) == 1


def test_too_many_raw_bytes(changed):
    """An answer of more bytes than were asked for is not read, and its process ends."""
    pool = changed()
    with pytest.raises(Exceeded):
        pool.run("echo", Limits(seconds=60.0, memory=1 << 30, output=1 << 20, raw=5), data=b"123", times=2)
    assert not pool.processes


def test_nothing_can_be_opened(changed):
    """After its decoders are loaded, no file, directory, pipe or socket can be opened and no process started."""
    *opened, forked, path = changed().run("tries", decode_limits(1, 1), data=b"x")
    assert set(opened) | {path} <= {"Too many open files", "Invalid argument"}
    assert os.geteuid() == 0 or forked  # root may start processes, whatever its limit


def test_a_decoder_that_crashes(changed):
    """A crash is the image's fault, and not tried again; a process that somebody else kills is replaced, once."""
    with pytest.raises(Exceeded, match="SIGSEGV"):
        changed().run("dies", decode_limits(1, 1), data=b"x")
    with pytest.raises(Ended, match="SIGKILL"):
        changed(signal.SIGKILL).run("dies", decode_limits(1, 1), data=b"x")


def test_errors_leave_the_process(pool):
    """An image that is refused ends no process: the next one is decoded by the same."""
    for data in (b"no image", encoded()[:40], encoded((2000, 1000))):
        with pytest.raises(Refused):
            image(pool, data)
        (size, pixels), expected = image(pool), bytes((1, 2, 3)) * 20
        assert (size, pixels) == ([5, 4], expected)
    assert len(pool.processes) == 1


def test_too_many_pixels(pool):
    """The error for too many pixels has their number."""
    with pytest.raises(Refused) as caught:
        image(pool, encoded((11, 10)), maximum=109)
    assert (caught.value.kind, caught.value.message) == ("TooManyPixels", "110")
    assert image(pool, encoded((11, 10)), maximum=110)[0] == [11, 10]


def test_limits_are_lowered_to_the_image(pool):
    """A process that may take gigabytes for the largest image has a small limit while it decodes a small one."""
    image(pool, limits=decode_limits(1 << 25, 100))
    (process,) = pool.processes
    with open(f"/proc/{process.pid}/limits") as limits:
        (line,) = (line for line in limits if line.startswith("Max address space"))
    assert int(line.split()[3]) < 512 << 20


def test_templates_and_images_do_not_meet():
    """Processes of images render nothing: a decoder that is taken over sees nobody's chat. Those of templates load no
    decoder."""
    assert IMAGES is not POOL
    image(IMAGES)
    POOL.run("reads", decode_limits(1, 1), source="{{ x }}")
    assert not IMAGES.processes & POOL.processes
    for process in POOL.processes:
        with open(f"/proc/{process.pid}/maps") as maps:
            assert "PIL" not in maps.read()


def test_without_pillow(pool, monkeypatch, tmp_path):
    """Without Pillow the process reports a ModuleNotFoundError."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(Refused) as caught:
        image(pool)
    assert caught.value.kind == "ModuleNotFoundError"


def test_a_fork_has_processes_of_its_own(pool):
    """A forked process decodes with its own, and leaves its parent's working."""
    assert image(pool)[0] == [5, 4]
    check_fork(pool, lambda: image(pool)[0])
