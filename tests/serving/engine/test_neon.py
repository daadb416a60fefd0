"""The kernels compiled for ARM, run by an emulator where a cross compiler and qemu-user are: Debian's
``g++-aarch64-linux-gnu`` and ``qemu-user``."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mlflow_llm.serving.engine.native import library

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
LIBRARIES = Path(library.__file__).parent
SOURCES = Path(__file__).parents[3] / "serving/engine/native"
NUMBERS = Path(__file__).with_name("kernel_numbers.cpp")
FLAGS = ("-std=c++17", "-O1", "-g0", "-w", "-pthread", "-ffp-contract=off", f"-I{SOURCES}")
LACKING = [word for word in (COMPILER, EMULATOR, "g++") if shutil.which(word) is None]

pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of ARM are compared with those of AVX2"),
    pytest.mark.skipif(library.why_not("avx2") is not None, reason=f"avx2: {library.why_not('avx2')}"),
]


OLDER, NEWER = "cortex-a76", "max"  # processors: with dot products; with i8mm too


def numbers_of(*command: str) -> tuple[np.ndarray, int]:
    """And what `mlt_supported` says there."""
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()  # 1: something is not the same alone
    return np.frombuffer(done.stdout, dtype=np.float32), int(done.stderr.split()[-1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    there = str(tmp_path_factory.mktemp("neon") / "there")
    neon = ("-march=armv8.2-a+dotprod", "-static", str(NUMBERS), str(SOURCES / "native.cpp"))
    subprocess.run([COMPILER, *FLAGS, *neon, "-o", there], check=True)
    return there


def test_kernels_of_arm_give_the_numbers_of_avx2(compiled: str, tmp_path: Path) -> None:
    """Linears, an encoder, a decoder with keys and values in float32 and int8, draws: each bitwise the same alone, in a
    batch, in chunks and on several threads; between the two processors up to rounding."""
    here = str(tmp_path / "here")
    avx2 = ("-mavx2", "-mfma", str(NUMBERS), str(LIBRARIES / "_native_avx2.so"))
    subprocess.run(["g++", *FLAGS, *avx2, "-o", here], check=True)
    wanted, _ = numbers_of(here)
    found, supported = numbers_of(EMULATOR, "-cpu", OLDER, "-L", SYSTEM, compiled)
    assert not supported & library.BYTE_PRODUCTS
    assert len(wanted) > 10_000
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_rows_two_by_two_are_what_each_is_alone(compiled: str) -> None:
    """Where the processor has i8mm; bitwise those of one that has not."""
    alone, _ = numbers_of(EMULATOR, "-cpu", OLDER, "-L", SYSTEM, compiled)
    pairs, supported = numbers_of(EMULATOR, "-cpu", NEWER, "-L", SYSTEM, compiled)
    assert supported & library.BYTE_PRODUCTS
    np.testing.assert_array_equal(pairs.view(np.uint32), alone.view(np.uint32))
