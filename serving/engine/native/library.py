"""The C interface of ``native.cpp``, bound by ctypes (which releases the interpreter lock during a call)."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import weakref
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...system.cpus import available_cpus, num_threads

logger = logging.getLogger(__name__)

VARIABLE = "MLFLOW_LLM_INSTRUCTION_SET"  # names the kernels' instruction set, one of INSTRUCTION_SETS
INTERFACE_VERSION = 9  # increased with every change of the C interface that the sizes of its structures do not show
GROUP_SIZE = 32  # inputs that share a scale of INT4; its widths must be a multiple of this
BUILD = "python setup.py build_ext --inplace"  # the command that compiles the kernels in a checkout
LANES = 16  # widths must be a multiple of this
PANEL = 32  # columns of a packed weight that are stored together
RUNS, MULTIPLIES_BF16, BYTE_PRODUCTS = 1, 2, 4  # bits of mlflow_llm_supported
F32, INT8, BF16, INT4, ROTATED, ROTATED_INT4 = range(6)  # kinds of packed weights
NO_TILES, AMX, EMULATED_TILES = 0, 1, 2
SILU, GELU_TANH, GELU = 0, 1, 2  # activations of a decoder
SPIN_US = 50  # how long a waiting thread spins: about the cost of putting it to sleep and waking it
IDLE_SPIN_US = 1000  # between two calls, if no other process wants the CPUs: about the rest of a step

WORK = CFUNCTYPE(c_int32, c_int32)  # called by mlflow_llm_each with an index; returns 0, or another number if it failed


class Factors(ctypes.Structure):
    """``Factors`` of lora.h: ``a`` and ``b`` as laid out there, ``scales`` [rank]; ``gain``, ``shift`` [N] or null."""

    _fields_ = (
        ("a", c_void_p), ("b", c_void_p), ("scales", c_void_p), ("gain", c_void_p), ("shift", c_void_p),
        ("rank", c_int32), ("kind", c_int32),
    )  # fmt: skip


class Norm(ctypes.Structure):
    """``Norm`` of norms.h: a LayerNorm with a bias, an RMSNorm without one, no norm without a weight."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Experts(ctypes.Structure):
    """``Experts`` of experts.h; none if ``router`` is null."""

    _fields_ = (
        ("router", c_void_p), ("gate_up", c_void_p), ("down", c_void_p), ("shared_expert_gate", c_void_p),
        ("count", c_int32), ("top_k", c_int32), ("normalized", c_int32), ("sparsemixer", c_int32),
        ("jitter_eps", c_float),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """``Layer`` of decoder.h. ``kv_offset``: elements from a slot's start to the layer's keys; ``window`` 0: none."""

    _fields_ = (
        ("before_attention", Norm), ("after_attention", Norm), ("before_mlp", Norm), ("after_mlp", Norm),
        ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("qkv", c_void_p), ("o", c_void_p), ("gate_up", c_void_p), ("down", c_void_p),
        ("window", c_int32), ("rotary_table", c_int32), ("kv_offset", c_int64), ("experts", Experts),
    )  # fmt: skip


class Shape(ctypes.Structure):
    """``Shape`` of decoder.h: sizes that all layers share."""

    _fields_ = (
        ("hidden", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("layers", c_int32), ("slot_tokens", c_int32), ("slot_elements", c_int64),
        ("eps", c_float), ("scaling", c_float), ("kv", c_int32), ("rotary_dims", c_int32), ("activation", c_int32),
        ("gated", c_int32), ("separate_branch", c_int32), ("norm_all_heads", c_int32), ("q_columns", c_int32),
        ("fused_gate_up", c_int32), ("embedding_scale", c_float), ("vector_scale", c_float), ("branch_scale", c_float),
        ("score_cap", c_float), ("logit_scale", c_float), ("logit_cap", c_float), ("tied", c_int32),
    )  # fmt: skip


class EncoderLayer(ctypes.Structure):
    """``EncoderLayer`` of encoder.h."""

    _fields_ = (
        ("qkv", c_void_p), ("o", c_void_p), ("up", c_void_p), ("down", c_void_p), ("attention", Norm), ("mlp", Norm),
        ("window", c_int32), ("rotary_table", c_int32),
    )  # fmt: skip


class EncoderEmbeddings(ctypes.Structure):
    """``EncoderEmbeddings`` of encoder.h. ``positions`` [longest text, H] begins at a text's first position, and
    includes what is added to every token."""

    _fields_ = (
        ("words", c_void_p), ("positions", c_void_p), ("norm", Norm), ("last", Norm), ("cos", c_void_p),
        ("sin", c_void_p), ("bias", c_void_p),
    )  # fmt: skip


class EncoderShape(ctypes.Structure):
    """``EncoderShape`` of encoder.h: sizes that all layers share."""

    _fields_ = (
        ("hidden", c_int32), ("heads", c_int32), ("head_dim", c_int32), ("intermediate", c_int32),
        ("layers", c_int32), ("max_length", c_int32), ("eps", c_float), ("scaling", c_float), ("norms_before", c_int32),
        ("gated", c_int32),
    )  # fmt: skip


class Draw(ctypes.Structure):
    """``Draw`` of sampler.h: how a row of logits is sampled; ``top_k`` 0 means all."""

    _fields_ = (
        ("temperature", c_float), ("top_p", c_float), ("min_p", c_float), ("top_k", c_int32),
        ("typical_p", c_float), ("seed", c_uint64), ("position", c_uint64),
    )  # fmt: skip


class Step(ctypes.Structure):
    """``Step`` of decoder.h.

    ``chunks`` is int32 [num_chunks, 6]: slot, first position, tokens, adapter (-1 for the base), first part, parts.
    ``parts``, [parts of all chunks, 2]: slot to read from, and the position before which it is read."""

    _fields_ = (
        ("chunks", c_void_p), ("num_chunks", c_int32), ("num_tokens", c_int32), ("parts", c_void_p), ("ids", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p), ("table_stride", c_int64), ("slab", c_void_p), ("adapters", c_void_p),
        ("logit_rows", c_void_p), ("num_logit_rows", c_int32), ("logits", c_void_p), ("vectors", c_void_p),
    )  # fmt: skip


STRUCTURES = (Factors, Norm, Experts, Layer, Shape, EncoderLayer, EncoderEmbeddings, EncoderShape, Draw, Step)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    """An instruction set and the ``file`` with its kernels.

    ``byte_products``: they use a byte dot-product instruction. ``tiles``: they use AMX, which not all CPUs
    have that can run the file. ``by_name``: it is only used if it is asked for."""

    file: str
    byte_products: bool = True
    tiles: bool = False
    by_name: bool = False

    @property
    def needed(self) -> int:
        return RUNS | (BYTE_PRODUCTS if self.byte_products else 0)

    def use(self, found: ctypes.CDLL) -> None:
        found.mlflow_llm_use_byte_products(self.byte_products)
        found.mlflow_llm_use_tiles(AMX if self.tiles else NO_TILES)


ARM: Mapping[str, InstructionSet] = {
    # SVE of 256 bits multiplies no more per cycle than the NEON of the same CPU. Nobody has measured which is
    # faster.
    "sve-i8mm": InstructionSet(file="_native_sve.so", by_name=True),
    "sve": InstructionSet(file="_native_sve.so", byte_products=False, by_name=True),
    "neon-i8mm": InstructionSet(file="_native.so"),
    "neon": InstructionSet(file="_native.so", byte_products=False),
}
X86: Mapping[str, InstructionSet] = {
    "avx512+amx": InstructionSet(file="_native.so", tiles=True),
    "avx512": InstructionSet(file="_native.so"),
    "avx-vnni": InstructionSet(file="_native_avx2.so"),
    "avx2": InstructionSet(file="_native_avx2.so", byte_products=False),
}
INSTRUCTION_SETS = ARM if platform.machine() in ("aarch64", "arm64") else X86  # by name, the best first
NEEDED = {
    "avx512+amx": "AVX-512 VNNI with AMX",
    "avx512": "AVX-512 VNNI",
    "avx-vnni": "AVX-VNNI",
    "avx2": "AVX2 with FMA and F16C",
    "neon-i8mm": "i8mm",
    "neon": "NEON with dot products",
    "sve-i8mm": "SVE with i8mm, or this process a vector length of 256 bits",
    "sve": "SVE, or this process a vector length of 256 bits",
}


class NotNative(Exception):
    """A model cannot run by the native kernels; the message says why, in terms that an operator can act on."""


def library() -> ctypes.CDLL | None:
    """Return the library; None if it was not built or does not run on this CPU."""
    try:
        return required()
    except NotNative:
        return None


def required() -> ctypes.CDLL:
    """Return the library. Raises ``NotNative``."""
    found = loaded()
    if isinstance(found, str):
        raise NotNative(found)
    return found


_wanted = os.environ.get(VARIABLE, "")


def loaded() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    return chosen(_wanted)[0]


def instruction_set() -> str:
    """Return the name of the instruction set whose kernels run, or "" if none do."""
    name = chosen(_wanted)[1] if library() is not None else ""
    return name if tiles() == AMX else name.removesuffix("+amx")


def library_path() -> Path:
    """Return the file with the kernels that run. Raises ``NotNative``."""
    required()
    return file_of(INSTRUCTION_SETS[chosen(_wanted)[1]])


def why_not(name: str) -> str | None:
    """Return why the kernels of an instruction set do not run here; None if they do. For tests, which name it."""
    if name not in INSTRUCTION_SETS:
        return f"not one of {platform.machine()}"
    found = load(name)
    return found if isinstance(found, str) else None


def use_instruction_set(name: str) -> None:
    """Set the instruction set of everything packed, loaded and run from now on; "" is the best one. For tests and
    measurements."""
    global _wanted
    _wanted = name
    found, picked = chosen(name)
    if not isinstance(found, str):
        INSTRUCTION_SETS[picked].use(found)


@cache
def chosen(wanted: str) -> tuple[ctypes.CDLL | str, str]:
    """Return the library of the wanted instruction set ("" for the best), or why there is none, and the set's name."""
    if wanted and wanted not in INSTRUCTION_SETS:
        return f"{VARIABLE} is {wanted!r}, not one of {', '.join(INSTRUCTION_SETS)}", ""
    reason = ""
    best = [name for name, instructions in INSTRUCTION_SETS.items() if not instructions.by_name]
    for name in [wanted] if wanted else best:
        found = load(name)
        if not isinstance(found, str):
            INSTRUCTION_SETS[name].use(found)
            return found, name
        reason = found
        if reason != lacks(name):  # a faulty library must be reported, not silently replaced by a slower one
            break
    return f"{VARIABLE} is {wanted!r}: {reason}" if wanted else reason, ""


def lacks(name: str) -> str:
    return f"the CPU lacks {NEEDED[name]}"


def file_of(instructions: InstructionSet) -> Path:
    return Path(__file__).with_name(instructions.file)


@cache
def load(name: str) -> ctypes.CDLL | str:
    """Load the library of an instruction set; return it, or why it cannot be used."""
    path = file_of(INSTRUCTION_SETS[name])
    if not path.exists():
        without = "without a compiler, or by one that does not know these instructions"
        return f"they are not compiled in the package in use (a source tree, or a wheel built {without})"
    try:
        found = ctypes.CDLL(str(path))
        needed = INSTRUCTION_SETS[name].needed
        if found.mlflow_llm_supported() & needed != needed:
            return lacks(name)
        if (reason := _why_stale(found, path.name)) is not None:
            logger.warning("%s", reason)
            return reason
        _declare(found)
        if INSTRUCTION_SETS[name].tiles and not found.mlflow_llm_has_tiles():
            return lacks(name)
        _use(found, num_threads())
    except (OSError, AttributeError) as error:  # built for another platform, or by another version of the package
        logger.warning("%s: %s", path, error)
        return "the compiled library does not load here (see the engine's log)"
    return found


def _why_stale(found: ctypes.CDLL, name: str) -> str | None:
    """Return why a library may not be called that another version of the package, or of its sources, was compiled to;
    None if it is this version's."""
    if not hasattr(found, "mlflow_llm_interface") or _interface_of(found) != _interface():
        return f"{name} was compiled with another version of the package: build it again ({BUILD})"
    digest = sources_digest()
    if digest is None:
        return None  # a wheel has no sources, and is built from the ones it belongs to
    if hasattr(found, "mlflow_llm_sources"):
        found.mlflow_llm_sources.restype = c_char_p
        if found.mlflow_llm_sources().decode() == digest:
            return None
    return f"{name} was compiled from other sources than those beside it: build it again ({BUILD})"


@cache
def sources_digest() -> str | None:
    """Return the digest of the sources beside this file, as setup.py gives it to the compiler; None if there are
    none."""
    folder = Path(__file__).parent
    paths = sorted([*folder.glob("*.cpp"), *folder.rglob("*.h")], key=lambda path: path.relative_to(folder).as_posix())
    if not paths:
        return None
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _interface() -> list[int]:
    return [INTERFACE_VERSION, *map(ctypes.sizeof, STRUCTURES)]


def _interface_of(found: ctypes.CDLL) -> list[int]:
    """Return the interface that a library was compiled with."""
    numbers = (c_int64 * 64)()
    return numbers[: found.mlflow_llm_interface(numbers, len(numbers))]


def has_bf16() -> bool:
    """Return whether bfloat16 can be multiplied: by AVX512-BF16, or as float32 without AVX-512."""
    found = library()
    return found is not None and bool(found.mlflow_llm_supported() & MULTIPLIES_BF16)


def why_no_bf16_kv(head_dim: int) -> str | None:
    """Return why keys and values of heads of this width cannot be kept in bfloat16; None if they can."""
    can = required().mlflow_llm_can_attend_bf16(head_dim)
    if not can & 2:
        return "the CPU lacks AMX for bfloat16"
    return None if can & 1 else f"the head width {head_dim} is not a multiple of 32"


def free_with(owner: object, free: Callable[[Any], None], handle: Any) -> None:
    """Call ``free`` with ``handle`` once ``owner`` is gone, but not when the process ends, as finalizers would. A
    thread may still be reading the memory then, in a step or for a file that it writes."""
    weakref.finalize(owner, free, handle).atexit = False


def use_threads(threads: int) -> None:
    """Set the threads of all calls from now on. With more threads than CPUs none spins, since others would wait."""
    found = library()
    if found is not None:
        _use(found, threads)


def share_cpus(shared: bool) -> None:
    """Set whether other processes want the CPUs too. If so, threads sleep sooner between two calls."""
    found = library()
    if found is not None:
        alone = not shared and found.mlflow_llm_threads() <= available_cpus().allowed
        found.mlflow_llm_idle_spin(IDLE_SPIN_US if alone else SPIN_US)


def num_native_threads() -> int:
    """Return the number of threads of the native kernels; 0 if there are none."""
    found = library()
    return int(found.mlflow_llm_threads()) if found is not None else 0


def tiles() -> int:
    """Return how products of several rows are computed: NO_TILES, AMX or EMULATED_TILES."""
    found = library()
    return NO_TILES if found is None else int(found.mlflow_llm_tiles())


def use_tiles(use: int) -> int:
    """Set the tiles of all calls from now on; return what is used, which is not AMX if the CPU lacks it. For
    tests and measurements."""
    found = library()
    return NO_TILES if found is None else int(found.mlflow_llm_use_tiles(use))


def _use(found: ctypes.CDLL, threads: int) -> None:
    found.mlflow_llm_use_threads(threads, SPIN_US if threads <= available_cpus().allowed else 0)


def _declare(found: ctypes.CDLL) -> None:
    def declare(name: str, result: object, *arguments: object) -> None:
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments

    def check(code: int, function: object, arguments: object) -> None:
        if code:
            message = found.mlflow_llm_last_error().decode(errors="replace")
            if code == 1:
                raise MemoryError("the native kernels ran out of memory")
            raise RuntimeError(f"the native kernels: {message}")

    def declare_checked(name: str, *arguments: object) -> None:
        declare(name, c_int32, *arguments)
        getattr(found, name).errcheck = check

    declare("mlflow_llm_last_error", c_char_p)
    declare("mlflow_llm_instructions", c_char_p)
    declare("mlflow_llm_threads", c_int32)
    declare("mlflow_llm_idle_spin", None, c_int32)
    declare_checked("mlflow_llm_use_threads", c_int32, c_int32)
    declare("mlflow_llm_use_byte_products", c_int32, c_int32)
    declare("mlflow_llm_has_tiles", c_int32)
    declare("mlflow_llm_tiles", c_int32)
    declare("mlflow_llm_use_tiles", c_int32, c_int32)
    declare_checked("mlflow_llm_each", c_int32, WORK)
    sizes = c_int32, c_int32, c_int32
    declare_checked("mlflow_llm_linear_new", *sizes, c_void_p, c_void_p, c_void_p, POINTER(c_void_p))
    declare_checked("mlflow_llm_linear_of_int8", *sizes, c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p))
    declare_checked(
        "mlflow_llm_linear_of_int4", *sizes, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p)
    )
    declare("mlflow_llm_linear_parts", None, c_void_p, POINTER(c_void_p), POINTER(c_int64))
    declare_checked("mlflow_llm_linear_over", c_int32, c_int32, c_int32, POINTER(c_void_p), POINTER(c_void_p))
    declare("mlflow_llm_linear_free", None, c_void_p)
    declare_checked("mlflow_llm_linear_dense", c_void_p, c_void_p)
    declare_checked("mlflow_llm_linear_multiply", c_void_p, c_int32, c_void_p, c_void_p)
    declare("mlflow_llm_can_attend", c_int32, c_int32, c_int32)
    declare("mlflow_llm_can_attend_bf16", c_int32, c_int32)
    declare(
        "mlflow_llm_decoder_new", c_void_p, POINTER(Shape), POINTER(Layer), c_void_p, c_void_p, POINTER(Norm), c_void_p
    )
    declare("mlflow_llm_decoder_free", None, c_void_p)
    declare_checked("mlflow_llm_decoder_step", c_void_p, POINTER(Step))
    declare_checked("mlflow_llm_largest", c_void_p, c_int32, c_int32, c_void_p)
    declare_checked("mlflow_llm_sample", c_void_p, c_int32, c_int32, c_void_p, c_void_p)
    declare_checked(
        "mlflow_llm_sample_rows", POINTER(c_void_p), POINTER(c_void_p), c_int32, c_int32, c_void_p, c_void_p
    )
    declare_checked(
        "mlflow_llm_continuations", POINTER(c_void_p), c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p
    )
    declare("mlflow_llm_exponentials", None, c_uint64, c_uint64, c_int32, c_void_p)
    declare(
        "mlflow_llm_encoder_new", c_void_p, POINTER(EncoderShape), POINTER(EncoderEmbeddings), POINTER(EncoderLayer)
    )
    declare("mlflow_llm_encoder_free", None, c_void_p)
    declare_checked("mlflow_llm_encoder_run", c_void_p, c_void_p, c_void_p, c_int32, c_void_p)
    declare("mlflow_llm_gelu", None, c_void_p, c_void_p, c_int32)
