"""Install the quickstart's libraries, torch and mlflow-llm into this interpreter's environment, and show how far it is.

Every file except torch's is checked against its hash (``tests/lock.sh``). The project does not prescribe a build of
torch, so an installed CPU or CUDA build is kept. If pip is offered a CPU build of this version (2.13.0+cpu), it takes
that one, because it sorts above the plain version.

The libraries are fetched and unpacked by two pips while mlflow-llm's kernels are compiled. Nothing is compiled to
bytecode before it is imported: of what is installed, the demo imports a third.
"""

from __future__ import annotations

import contextlib
import glob
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "examples" / "quickstart" / "requirements.lock"
TORCH = "torch==2.13.0"
FIRST = ("pip", "setuptools")  # the newest pip unpacks faster than Python's own; setuptools builds mlflow-llm
PIP = (sys.executable, "-m", "pip")
LOCKED = ("install", "--no-compile", "--require-hashes", "--no-deps", "-r")
TURN = 0.5  # seconds between looks


class Job:
    """A pip that runs beside others. Its output goes to ``log``, and is shown if it fails."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen([*PIP, *arguments], stdout=output, stderr=subprocess.STDOUT)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def check(self) -> None:
        """Wait for the end; exit with the output's end where it failed."""
        if self._process.wait():
            sys.exit(f"pip failed; the end of its output:\n{self.output[-3000:]}")

    def stop(self) -> None:
        if self.is_running:
            self._process.terminate()
        self._process.wait()


def requirements(text: str) -> list[str]:
    """Return the requirements of a lockfile, each with its hashes."""
    found = re.findall(r"^[a-z0-9][^\n]*(?:\n +--hash[^\n]*)*\n?", text, re.MULTILINE)
    return [one if one.endswith("\n") else f"{one}\n" for one in found]


def name_of(requirement: str) -> str:
    return re.split(r"[=<>~\[ ]", requirement, maxsplit=1)[0]


def fetched(output: str) -> int:
    """Return the number of packages of which pip has begun to fetch the file, or to take it from its cache."""
    return len(re.findall(r"^Collecting ", output, re.MULTILINE))


def left_out(output: str) -> int:
    """Return the number of requirements that are for other platforms."""
    return len(re.findall(r"^Ignoring ", output, re.MULTILINE))


def sizes(output: str) -> str:
    """Return the size of what pip fetches now, as it says it: ``190.2 MB``, "" if it does not."""
    found = re.findall(r"Downloading \S+ \(([\d.]+ [kMG]?B)\)", output)
    return found[-1] if found else ""


def show(text: str, *, is_over: bool = False) -> None:
    """Show how far a step is: on a line that a terminal draws again, else only once it is over."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K             {text}", end="\n" if is_over else "", flush=True)
    elif is_over:
        print(f"             {text}", flush=True)


@contextlib.contextmanager
def jobs(scratch: Path, *commands: tuple[str, ...]) -> Iterator[list[Job]]:
    """Run pips, and stop those that still run when the block is left."""
    started = [Job(scratch / f"log-{time.monotonic_ns()}-{number}", *each) for number, each in enumerate(commands)]
    try:
        yield started
    finally:
        for job in started:
            job.stop()


def install_libraries(scratch: Path, wanted: list[str]) -> None:
    halves = [scratch / f"half-{number}" for number in range(2)]
    for number, half in enumerate(halves):
        half.write_text("".join(wanted[number::2]))
    began = time.monotonic()
    before = num_installed()
    with jobs(scratch, *((*LOCKED, str(half)) for half in halves)) as started:
        while any(job.is_running for job in started):
            number = sum(fetched(job.output) for job in started)
            total = len(wanted) - sum(left_out(job.output) for job in started)
            show(f"{number} of {total} libraries fetched, {num_installed() - before} installed")
            time.sleep(TURN)
        for job in started:
            job.check()
    show(f"{num_installed() - before} libraries ({time.monotonic() - began:.0f} s)", is_over=True)


def install_torch(scratch: Path) -> None:
    began = time.monotonic()
    with jobs(scratch, ("install", "--no-compile", TORCH)) as (job,):
        while job.is_running:
            doing = "unpacking torch" if "Installing collected" in job.output else "fetching torch"
            show(f"{doing} {sizes(job.output)}, {time.monotonic() - began:.0f} s")
            time.sleep(TURN)
        job.check()
    show(f"torch ({time.monotonic() - began:.0f} s)", is_over=True)


def num_installed() -> int:
    """Return the number of packages that are in the environment."""
    return sum(len(glob.glob(f"{place}/*.dist-info")) for place in sys.path if place.endswith("site-packages"))


def main() -> None:
    began = time.monotonic()
    wanted = requirements(LOCK.read_text())
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        first = scratch / "first"
        first.write_text("".join(one for one in wanted if name_of(one) in FIRST))
        Job(scratch / "log-first", *LOCKED, str(first)).check()
        build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(scratch / "wheels"), str(ROOT))
        with jobs(scratch, build) as (kernels,):
            install_libraries(scratch, [one for one in wanted if name_of(one) not in FIRST])
            install_torch(scratch)
            while kernels.is_running:
                show(f"compiling the kernels of mlflow-llm, {time.monotonic() - began:.0f} s")
                time.sleep(TURN)
            kernels.check()
        (wheel,) = (scratch / "wheels").glob("*.whl")
        Job(scratch / "log-last", "install", "--force-reinstall", "--no-deps", str(wheel)).check()
    show(f"mlflow-llm; {time.monotonic() - began:.0f} s in all", is_over=True)


if __name__ == "__main__":
    main()
