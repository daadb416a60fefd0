"""The plan of a run on a GPU: what is measured, on which weights. Each process of the run gets it as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

Record: TypeAlias = dict[str, Any]
PARTS = ("tests", "families", "prefill", "decode", "features", "http", "profile", "peers")
INSIDE, SERVER = "in process", "server"  # whose rates the part http has
FOLDERS = (  # of tests that run on a device; ``engine`` has more, which are of the CPU alone
    "tests/serving/engine/devices",
    "tests/serving/engine/attention/paged",
    "tests/serving/engine/sampling",
    "tests/serving/engine/forward",
    "tests/serving/engine/models/fused",
    "tests/serving/engine/weights",
)


def in_blocks(device: str) -> dict[str, Any]:
    """Return the settings that keep KV in blocks on a CPU too."""
    return {"kv_block_size": 16, "kernels": "torch"} if device == "cpu" else {}


class Plan(Struct, frozen=True, kw_only=True):
    """The arguments of a run. ``folder`` holds weights, tokenizers and adapters of each size; ``prefills`` are numbers
    of prompts and their length; ``families`` () means all; ``share`` is the part of them that a process runs."""

    size: str
    device: str
    folder: str
    by: str = "ours"  # the contender's name in records
    model: str = ""  # a checkpoint instead of random weights
    parts: tuple[str, ...] = PARTS
    sequences: tuple[int, ...] = (1, 8, 32, 128)
    prefills: tuple[tuple[int, int], ...] = ((1, 1024), (8, 1024), (1, 3900), (8, 3900))
    batch: int = 32  # sequences of the features
    prompt: int = 128
    new: int = 128
    quantization: str = "none"
    async_scheduling: str = "auto"
    cuda_graphs: str = "auto"
    rounds: int = 3
    families: tuple[str, ...] = ()
    share: tuple[int, int] = (0, 1)
    tests: tuple[str, ...] = FOLDERS
    limit: float = 600.0  # seconds of the tests, after which pytest is interrupted

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def model_dir(self) -> Path:
        return Path(self.model) if self.model else Path(self.folder) / self.size

    @property
    def tokenizer_dir(self) -> Path:
        return Path(self.folder) / f"tokenizer-{self.size}"

    @property
    def adapters_dir(self) -> Path:
        return Path(self.folder) / f"adapters-{self.size}"

    def bundle(self) -> Bundle:
        tokenizer = str(self.tokenizer_dir) if self.tokenizer_dir.is_dir() else ""
        return Bundle(
            content_hash=f"gpu-{self.size}", tasks=("completions",), model_dir=str(self.model_dir),
            tokenizer_dir=tokenizer,
        )  # fmt: skip

    def settings(self, **more: Any) -> EngineSettings:
        """Return the settings of an engine for all sequences of the plan: the defaults of the device but for their
        number. On a CPU, KV is in blocks there too."""
        own = {
            "quantization": self.quantization,
            "async_scheduling": self.async_scheduling,
            "cuda_graphs": self.cuda_graphs,
        }
        count = max(*self.sequences, *(count for count, _ in self.prefills), self.batch)
        return EngineSettings.read(
            {"device": self.device, "max_num_seqs": count, **own, **in_blocks(self.device), **more}
        )

    def but(self, **changes: Any) -> Plan:
        return msgspec.structs.replace(self, **changes)


Contender: TypeAlias = Callable[[Plan], Iterator[Record]]
