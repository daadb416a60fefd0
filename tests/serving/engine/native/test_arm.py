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
SOURCES = Path(__file__).parents[4] / "serving/engine/native"
NUMBERS, LENGTH = (Path(__file__).with_name(name) for name in ("kernel_numbers.cpp", "vector_length.cpp"))
FLAGS = ("-std=c++17", "-O1", "-g0", "-w", "-pthread", "-ffp-contract=off", f"-I{SOURCES}")
LACKING = [word for word in (COMPILER, EMULATOR, "g++") if shutil.which(word) is None]

pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of ARM are compared with those of AVX2"),
    pytest.mark.skipif(library.why_not("avx2") is not None, reason=f"avx2: {library.why_not('avx2')}"),
]

OLDER, NEWER = "cortex-a76", "max"  # emulated CPUs: with dot products; with i8mm too
OLDER_SVE, NEWER_SVE = "a64fx,sve512=off", "max,sve-max-vq=2"  # of 256 bits
LATER = "0 2 the vector length of this thread is not 256 bits"
LENGTHS = {  # emulated CPUs, and what vector_length.cpp prints on them
    "cortex-a76": "0",
    "max,sve-max-vq=1": "0",
    "a64fx": "0",
    "max,sve-max-vq=16,sve-default-vector-length=-1": "0",
    "max,sve-default-vector-length=32": f"7 {LATER}",
    OLDER_SVE: f"3 {LATER}",
}
LIBRARY = ("-fPIC", "-shared", "-msve-vector-bits=256", str(SOURCES / "native_sve.cpp"))  # as setup.py builds it


def output_of(*command: str) -> tuple[bytes, str]:
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()  # 1: a result differs when computed alone
    return done.stdout, done.stderr.decode()


def numbers_of(*command: str) -> tuple[np.ndarray, int]:
    """Return the results of a program and of `mlflow_llm_supported` on the emulated CPU."""
    numbers, said = output_of(*command)
    return np.frombuffer(numbers, dtype=np.float32), int(said.split()[-1])


def emulated(cpu: str, program: str) -> tuple[str, ...]:
    return (EMULATOR, "-cpu", cpu, "-L", SYSTEM, program)


def build(*arguments: str) -> str:
    """Compile into the file named by the last argument, and return it."""
    subprocess.run([COMPILER, *FLAGS, *arguments[:-1], "-o", arguments[-1]], check=True)
    return arguments[-1]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    there = str(tmp_path_factory.mktemp("neon") / "there")
    return build("-march=armv8.2-a+dotprod", "-static", str(NUMBERS), str(SOURCES / "native.cpp"), there)


@pytest.fixture(scope="module")
def alone(compiled: str) -> np.ndarray:
    """Return the results of NEON without i8mm."""
    numbers, supported = numbers_of(*emulated(OLDER, compiled))
    assert not supported & library.BYTE_PRODUCTS
    return numbers


@pytest.fixture(scope="module")
def sve(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(*LIBRARY, str(tmp_path_factory.mktemp("sve") / "_native_sve.so"))


def test_kernels_of_arm_give_the_numbers_of_avx2(alone: np.ndarray, tmp_path: Path) -> None:
    """Linears, an encoder, a decoder with keys and values in float32 and int8, and draws are each bitwise the same
    alone, in a batch, in chunks and on several threads, and between the two CPUs up to rounding."""
    here = str(tmp_path / "here")
    avx2 = ("-mavx2", "-mfma", str(NUMBERS), str(LIBRARIES / "_native_avx2.so"))
    subprocess.run(["g++", *FLAGS, *avx2, "-o", here], check=True)
    wanted, _ = numbers_of(here)
    assert len(wanted) > 10_000
    np.testing.assert_allclose(alone, wanted, rtol=1e-4, atol=1e-4)


def test_i8mm_gives_the_bits_of_single_rows(compiled: str, alone: np.ndarray) -> None:
    """Products of row pairs with i8mm are bitwise those of a CPU without it."""
    pairs, supported = numbers_of(*emulated(NEWER, compiled))
    assert supported & library.BYTE_PRODUCTS
    np.testing.assert_array_equal(pairs.view(np.uint32), alone.view(np.uint32))


def test_sve_gives_the_numbers_of_neon(sve: str, alone: np.ndarray, tmp_path: Path) -> None:
    """SVE gives the bits of NEON, with i8mm and without, because the order of sums is the same."""
    flags = ("-march=armv8.2-a+sve", "-msve-vector-bits=256", "-DMLFLOW_LLM_SVE")
    there = build(*flags, str(NUMBERS), sve, str(tmp_path / "there"))
    for cpu, has in ((NEWER_SVE, True), (OLDER_SVE, False)):
        numbers, supported = numbers_of(*emulated(cpu, there))
        assert bool(supported & library.BYTE_PRODUCTS) == has
        np.testing.assert_array_equal(numbers.view(np.uint32), alone.view(np.uint32))


def test_sve_runs_at_its_own_vector_length_alone(sve: str, tmp_path: Path) -> None:
    """The SVE library is refused without SVE, at 128, 512 and 2048 bits, and in a thread whose length changes later."""
    asks = build(str(LENGTH), sve, str(tmp_path / "asks"))
    found = {cpu: output_of(*emulated(cpu, asks))[0].decode() for cpu in LENGTHS}
    assert found == LENGTHS
