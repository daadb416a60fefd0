"""The inner loops of the kernels keep their sums in registers.

A compiler that gives up on one of them puts all of its sums into memory at every turn of the loop. All numbers stay the
same then, and the kernel takes twice the time.
"""

import platform
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from mlflow_llm.serving.engine.native import library

FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>.*)>:$")
INSTRUCTION = re.compile(r"^ *(?P<at>[0-9a-f]+):\t(?:\{vex\} )?(?P<name>\S+) *(?P<operands>.*)$")
PRODUCT = re.compile(r"vpdpbusd|vdpbf16ps|vfmadd\d+ps|vpmaddwd|vpmaddubsw")
INTO_STACK = re.compile(r"%[yz]mm\d+,-?(0x[0-9a-f]+)?\(%r[sb]p")
MANY = 8  # products in an iteration of the loop

KERNELS = {  # by library: part of a kernel's name, and the min number of such kernels (row counts, kinds of weights)
    "_native.so": {
        "mlflow_llm::tile<": 3 * 12,
        "mlflow_llm::int4_tile<": 6,
        "mlflow_llm::VectorProducts<false>::score<": 3,
        "mlflow_llm::VectorProducts<false>::weighted_values<": 3,
        "mlflow_llm::accumulate_values<": 9,
        "mlflow_llm::product<": 24,
    },
    "_native_avx2.so": {
        "mlflow_llm::narrow_sums<": 12,
        "mlflow_llm::word_sums<": 8,
        "mlflow_llm::wide_word_sums<": 4,
        "mlflow_llm::int4_sums<": 11,
        "mlflow_llm::accumulate_values<": 9,
        "mlflow_llm::product<": 9,
    },
}


def functions(listing):
    """Return (address, mnemonic, operands) of each function's instructions, by its name."""
    found, name = defaultdict(list), ""
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            name = match["name"]
        elif match := INSTRUCTION.match(line):
            found[name].append((int(match["at"], 16), match["name"], match["operands"]))
    return found


def inner_loops(instructions):
    """Return the instructions of each loop that contains no other."""
    places = {at: i for i, (at, _, _) in enumerate(instructions)}
    ends = [
        (places[target], i)
        for i, (at, name, operands) in enumerate(instructions)
        if name.startswith("j") and (target := target_of(operands)) in places and target <= at
    ]
    for first, last in ends:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in ends):
            yield instructions[first : last + 1]


def target_of(operands):
    return int(operands.split()[0], 16) if re.match(r"[0-9a-f]+ <", operands) else None


def spilled(instructions):
    """Count loops of many products that write vectors to the stack."""
    return sum(
        sum(bool(PRODUCT.match(name)) for _, name, _ in loop) >= MANY
        and any(INTO_STACK.search(operands) for _, _, operands in loop)
        for loop in inner_loops(instructions)
    )


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the registers of x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump, which comes with the compiler")
@pytest.mark.parametrize("name", KERNELS)
def test_sums_stay_in_registers(name):
    """The inner loops of every kernel keep their sums in registers."""
    path = Path(library.__file__).with_name(name)
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
    found = functions(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for part, minimum in KERNELS[name].items():
        kernels = {name: instructions for name, instructions in found.items() if part in name}
        assert len(kernels) >= minimum, f"{part} is not found by its name: {len(kernels)}"
        assert {name: count for name, instructions in kernels.items() if (count := spilled(instructions))} == {}


def test_a_loop_that_spills_is_found():
    """A loop that stores a sum to the stack is found; other loads and stores are not counted."""

    def loop(*extra):
        products = [f" {16 + i:x}:\tvpdpbusd %zmm1,%zmm2,%zmm3" for i in range(MANY)]
        lines = ["0000000000000010 <kernel>:", *products, *extra, " 40:\tjne    10 <kernel>", " 42:\tret"]
        return functions("\n".join(lines))["kernel"]

    assert spilled(loop(" 30:\tvmovdqa64 %zmm3,0x40(%rsp)")) == 1
    assert spilled(loop(" 30:\tvmovaps %ymm3,-0x20(%rbp)")) == 1
    assert spilled(loop(" 30:\tvmovdqa64 %zmm3,(%rdi)")) == 0
    assert spilled(loop(" 30:\tvmovdqa64 0x40(%rsp),%zmm3")) == 0
