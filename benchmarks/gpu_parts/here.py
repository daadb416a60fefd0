"""A list of what is installed here of what a run on a GPU uses, and whether it can begin.

    python benchmarks/gpu_parts/here.py DEVICE

Exit status 2 says that it cannot: torch or transformers cannot be imported, or torch finds no device.
"""

from __future__ import annotations

import configparser
import re
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BESIDE = ("triton", "huggingface_hub", "peft", "pytest", "pytest-timeout", "pytest-xdist", "vllm")


def names() -> list[str]:
    """Return this project's requirements, and what parts of the run use beside them."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    required = [re.split(r"[^\w.-]", line)[0] for line in config["options"]["install_requires"].split("\n") if line]
    return [*required, *(name for name in BESIDE if name not in required)]


def main(device: str) -> int:
    there, missing = [], []
    for name in names():
        try:
            there.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    print(f"installed: {', '.join(there)}")
    print(f"missing: {', '.join(missing) or 'nothing'}")
    for name in ("torch", "transformers"):
        try:
            import_module(name)
        except ImportError as error:
            print(f"{name} cannot be imported, so nothing can be run: {error}")
            return 2
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        print("torch finds no CUDA device here, or was built without CUDA: nothing can be run")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
