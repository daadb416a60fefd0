"""``benchmarks/gpu.py`` on a tiny model without a GPU, and the messages of its script."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import gpu
import pytest
import torch

SCRIPT = Path(gpu.__file__).with_suffix(".sh")


def test_a_table_of_a_tiny_model(tmp_path: Path) -> None:
    """Weights are made, the engine decodes over blocks in floats and in fp8, and each line has rates, floors and their
    ratios."""
    gpu.make_weights("tiny", "cpu", tmp_path)
    args = argparse.Namespace(
        size="tiny", device="cpu", sequences=[1, 3], prompt=20, new=6, cuda_graphs="auto", launch_ahead="auto",
        model=tmp_path,
    )  # fmt: skip
    ours = json.loads(json.dumps(gpu.run_ours(args)))
    assert set(ours["steps"]) == {"1", "3"}
    assert all(seconds > 0 for seconds in ours["steps"].values())
    assert ours["attention"] == "torch"
    assert (len(ours["reasons"]), ours["ahead"]) == (3, False)
    fp8 = json.loads(json.dumps(gpu.run_ours(args, "fp8")))
    assert "few rows are multiplied as floats" in fp8["reasons"][3]
    slower = {"steps": {"1": ours["steps"]["1"] * 2}}
    lines = gpu.table(args, ours, slower, fp8, slower, 1e9).splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
    assert [row[7] for row in cells] == ["2.00", "–"]
    assert [row[3] for row in cells] == [row[6] for row in cells]
    assert len({line.count("|") for line in lines}) == 1
    assert "nan" not in "".join(lines)


def test_the_floor() -> None:
    """The floor of a one-sequence step is the time to read every multiplied weight of Llama 3.2 1B and its keys and
    values."""
    config = gpu.config_of("1b")
    assert gpu.floor_seconds(config, 2, 1, 0, 1.0) == pytest.approx(2 * 1.2358e9, rel=0.01)
    more = gpu.floor_seconds(config, 2, 8, 100, 1.0) - gpu.floor_seconds(config, 2, 8, 0, 1.0)
    saved = gpu.floor_seconds(config, 2, 1, 0, 1.0) - gpu.floor_seconds(config, 2, 1, 0, 1.0, 1)
    assert saved == pytest.approx(1.2358e9 - config.hidden_size * config.vocab_size, rel=0.01)
    assert more == 8 * 100 * 2 * 512 * 16 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and the script would use it")
def test_the_script_says_what_is_missing() -> None:
    """Without a device the script lists the machine's parts and ends with status 2."""
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "torch finds no CUDA device" in done.stdout
    assert "vllm: missing" in done.stdout
