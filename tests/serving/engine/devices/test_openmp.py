"""The spin time of torch's OpenMP threads, changed while they run, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

SCRIPT = """
import threading, torch
from mlflow_llm.serving.engine.devices.openmp import waiting

def crowd():
    return [t for t in threading.enumerate() if t.name == "openmp-crowd"]

x = torch.randn(300, 300)
want = x @ x
for _ in range(3):
    waiting.set_brief(True); waiting.set_brief(True)
    assert torch.equal(x @ x, want)
    brief = waiting.brief, len(crowd())
    there = crowd()
    waiting.set_brief(False); waiting.set_brief(False)
    for thread in there:
        thread.join(240)
    assert torch.equal(x @ x, want)
    assert not crowd()
print(*brief)
"""


def run(**environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**inherited, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's runtime on Linux")
def test_short_spinning_yields_to_other_threads() -> None:
    """Short spinning applies to one thread with its own team, as long as asked; torch's results stay the same."""
    assert run() == "True 1"


def test_wait_policy_of_the_environment_stays() -> None:
    """A wait policy or a number of spins that the operator has set is left as it is."""
    assert run(OMP_WAIT_POLICY="passive") == "False 0"
    assert run(GOMP_SPINCOUNT="5") == "False 0"
