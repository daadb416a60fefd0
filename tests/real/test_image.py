"""The image of examples/deploy, built without a network from a folder of wheels, and run as it is deployed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("debootstrap", "buildah", "unshare", "ip")
WHEELS = os.environ.get("MLFLOW_LLM_WHEELS", "")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed (apt-get install debootstrap buildah iproute2): {MISSING}")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a Debian and build in it")
@pytest.mark.skipif(not WHEELS, reason="MLFLOW_LLM_WHEELS does not name a folder of wheels; tests/image.sh makes one")
@pytest.mark.timeout(3600)
def test_an_image_answers(smollm2_dir: Path) -> None:
    """``mlflow-llm run`` answers in the image, and its server answers only with a key and ends with its signal."""
    command = ["bash", str(ROOT / "tests/image.sh"), str(smollm2_dir), WHEELS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    command_said, _, server_said = done.stdout.partition("one command")[2].partition("the server with keys")
    assert "Paris" in command_said
    assert "Paris" in server_said
