"""Load a decoder or an encoder from its packed file, in the layout that runs natively.

The file is mapped, so no weights are read, packed and compared with the model's own code. A model has a packed file if
it was loaded in full before, by the same code.

The model's structure is built without memory; its linears and all other parameters and buffers come from the file. The
file also holds the logits (an encoder's hidden states) that the model's own code gave. The mapped model has to
reproduce them before it answers any request.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import threading
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ....interface.bundle import Bundle
from ....interface.settings import EngineSettings
from ...attention import attention
from ...native import library
from ...native.weight import NativeWeight
from ...weights import linear
from ...weights.config_bounds import in_proportion
from ...weights.forward_context import ContextHolder
from ...weights.linear import LinearSet
from ..resolved_settings import ResolvedSettings
from ..verification import LayerUse, SelfTest
from .cache_file import Array, open_packed, write_packed
from .source import PackedSource

logger = logging.getLogger(__name__)

FORMAT_VERSION = 5
KEY_LENGTH = 32
HASH = re.compile(r"[0-9a-f]{64}")
Kind = Literal["decoder", "encoder"]
PACKAGES = ("mlflow-llm", "torch", "transformers")


def packed_key(kind: Kind, bundle: Bundle, resolved: ResolvedSettings) -> str | None:
    """Return the name of this model's packed file; None if it cannot have one.

    A model without a content hash cannot be identified, one without the hashes of its files cannot be checked, and a
    model with code of its own may do anything with its weights.
    """
    settings, dtype = resolved.settings, resolved.dtype
    covered = settings.packed_cache and settings.kernels == "auto" and not settings.trust_remote_code
    runs = dtype == torch.float32 or (dtype == torch.bfloat16 and library.has_bf16())
    on_cpu = resolved.device.type == "cpu" and runs and library.library() is not None
    if not (covered and on_cpu and bundle.model_hashes and HASH.fullmatch(bundle.content_hash)):
        return None
    code = _code(library.library_path())
    described = (FORMAT_VERSION, kind, bundle.content_hash, settings.quantization, str(dtype), library.has_bf16(), code)
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:KEY_LENGTH]


@functools.cache
def _code(path: Path) -> tuple[str, ...]:
    """Return what identifies the code that lays out weights: a hash of the kernels and the versions of packages."""
    kernels = hashlib.sha256(path.read_bytes()).hexdigest()
    return (kernels, *(version(name) for name in PACKAGES))


class MappedModel:
    """The content of a packed file: ``model`` and ``linears`` as ``linear.install`` leaves them."""

    def __init__(self, auto: Any, folder: str, settings: EngineSettings, holder: ContextHolder, key: str) -> None:
        """Map the file. Raises ``LookupError`` if there is none, or if the model is built differently today."""
        found = open_packed(key)
        if found is None:
            raise LookupError(key)
        self.arrays, self.facts = found
        self._kinds = self.facts["kinds"]
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with in_proportion(folder), torch.device("meta"):
            self.model: Any = auto.from_config(
                config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            )
        self.model.eval().requires_grad_(False)
        self.linears = linear.install(self.model, holder, settings, self._packed)
        self._fill()

    def tensor(self, name: str) -> torch.Tensor:
        return _tensor(self.arrays[name])

    def _packed(self, names: tuple[str, ...], weight: Any, bias: Any, is_head: bool) -> NativeWeight:
        name = "linear/" + "+".join(names)
        parts = {path.rpartition("/")[2]: array for path, array in self.arrays.items() if path.startswith(f"{name}/")}
        if name not in self._kinds or (bias is not None) != ("bias" in parts):
            raise LookupError(name)
        return NativeWeight.over(tuple(weight.shape), self._kinds[name], parts)

    def _fill(self) -> None:
        """Give the remaining parameters and buffers their values."""
        for kind, names in (("parameter", self.model.named_parameters()), ("buffer", self.model.named_buffers())):
            for name, value in list(names):
                array = self.arrays[f"{kind}/{name}"]
                if array.shape != tuple(value.shape):
                    raise LookupError(name)
                parent, _, own = name.rpartition(".")
                tensor = _tensor(array)
                given = nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor
                module = self.model.get_submodule(parent)
                (module._parameters if kind == "parameter" else module._buffers)[own] = given


class MappedDecoder(MappedModel):
    """A mapped decoder: the ``uses`` of its layers, and the ``test`` that it has to pass."""

    def __init__(self, bundle: Bundle, settings: EngineSettings, holder: ContextHolder, key: str) -> None:
        """Map the model. Raises what ``MappedModel`` does."""
        super().__init__(AutoModelForCausalLM, bundle.model_dir, settings, holder, key)
        attention.install(self.model, holder)
        self.model.set_attn_implementation(attention.NAME)
        self.uses = msgspec.convert(self.facts["uses"], list[LayerUse])
        count = range(self.facts["tests"])
        self.test = SelfTest(
            [self.arrays[f"test/{i}/tokens"] for i in count], [self.tensor(f"test/{i}/expected") for i in count]
        )


class MappedEncoder(MappedModel):
    """A mapped encoder.

    ``tests`` are texts of token ids; ``expected`` is what the model's own code made of them, one after the other.
    """

    def __init__(self, folder: str, settings: EngineSettings, holder: ContextHolder, key: str) -> None:
        """Map the model. Raises what ``MappedModel`` does."""
        super().__init__(AutoModel, folder, settings, holder, key)
        self.tests: list[list[int]] = self.facts["tests"]
        self.expected = self.tensor("expected")


def _tensor(array: Array) -> torch.Tensor:
    """Return a tensor over the same memory. torch warns that it cannot protect it from writes; nothing here writes to
    it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def keep_decoder(
    key: str,
    source: PackedSource,
    model: Any,
    linears: LinearSet,
    uses: list[LayerUse],
    test: SelfTest,
    limit: int,
) -> threading.Thread:
    """Write the file that ``MappedDecoder`` maps, on a thread, unless ``source`` is not what the manifest says."""
    arrays: dict[str, Array] = {}
    for i, (tokens, expected) in enumerate(zip(test.tokens, test.expected, strict=True)):
        arrays |= {f"test/{i}/tokens": tokens, f"test/{i}/expected": expected.numpy()}
    facts = {"uses": [msgspec.to_builtins(use) for use in uses], "tests": len(test.tokens)}
    return _keep(key, source, model, linears, arrays, facts, limit)


def keep_encoder(
    key: str,
    source: PackedSource,
    model: Any,
    linears: LinearSet,
    tests: list[list[int]],
    expected: torch.Tensor,
    limit: int,
) -> threading.Thread | None:
    """Write the file that ``MappedEncoder`` maps, as ``keep_decoder`` does; None if a linear outside its layers is not
    native."""
    if not all(isinstance(one.group.packed, NativeWeight) for one in linears.linears.values()):
        return None
    return _keep(key, source, model, linears, {"expected": expected.numpy()}, {"tests": tests}, limit)


def _keep(
    key: str,
    source: PackedSource,
    model: Any,
    linears: LinearSet,
    more: Mapping[str, Array],
    facts: Mapping[str, Any],
    limit: int,
) -> threading.Thread:
    """Write the packed file on a thread, so that the next load of the model is faster. A failure is only logged.

    The source is hashed before, and looked at again after: parameters may be a mapping of its files."""
    arrays = dict(more)
    kinds, held = {}, []
    for of, packed in linears.packed.items():
        assert isinstance(packed, NativeWeight), "others have no packed form of ours"
        name = f"linear/{of}"
        kinds[name] = packed.kind
        arrays |= {f"{name}/{part}": array for part, array in packed.parts().items()}
        held.append(packed)
    arrays |= {f"parameter/{name}": value.detach().numpy() for name, value in model.named_parameters()}
    arrays |= {f"buffer/{name}": value.numpy() for name, value in model.named_buffers()}

    def write() -> None:
        try:
            source.check()
            write_packed(key, arrays, {**facts, "kinds": kinds}, limit, source.check_unchanged)
        except (OSError, ValueError) as error:
            logger.warning("packed weights are not kept: %s", error)
        held.clear()

    writer = threading.Thread(target=write, name="mlflow-llm-packed", daemon=True)
    writer.start()
    return writer
