"""Decoder families: ragged, chunked batches give what transformers' generate() gives for each prompt alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from engine_runs import run
from packaging.version import Version
from tiny_models import FAMILIES, MORE_FAMILIES, REFUSED, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

SINCE = {"gptj": "5.24"}  # the first transformers version whose code of the family lets attention be replaced
LENGTHS = (1, 3, 40, 9, 23, 17)  # longer than the sliding window, longer than a chunk


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_equals_generate(family: str, tmp_path: Path) -> None:
    """Greedy tokens of a mixed batch with chunked prefill equal generate()'s, token for token."""
    check_equals_generate(FAMILIES[family], tmp_path)


def check_equals_generate(make_config: Callable[[], Any], tmp_path: Path) -> None:
    model = make_model(make_config())
    settings = EngineSettings(max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory=1 << 24)
    core = EngineCore(save_bundle(model, tmp_path), settings)
    prompts = [prompt_of(n, seed) for seed, n in enumerate(LENGTHS)]
    outcomes = run(core, *(request_of(str(i), p) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(model, prompt, 12), i
        assert outcomes[str(i)].finished[0].reason == "length"
    core.close()


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refuses_a_family_whose_attention_cannot_be_replaced(family: str, tmp_path: Path) -> None:
    """A family whose attention cannot be replaced is refused by name at load, until transformers allows it."""
    if Version(tf.__version__) >= Version(SINCE.get(family, "6")):
        check_equals_generate(REFUSED[family], tmp_path)
        return
    model = make_model(REFUSED[family]())
    with pytest.raises(PackagingError, match=type(model).__name__):
        EngineCore(save_bundle(model, tmp_path), EngineSettings(kv_cache_memory=1 << 24))


def test_the_page_lists_what_is_tried() -> None:
    """docs/architectures.md has a row for every case, none was wrong, and those that the tests run are marked so."""
    page = (Path(__file__).parents[4] / "docs/architectures.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(" `"): cells for line in page.splitlines() if len(cells := line.split("|")) == 8}
    rows = {family: cells for family, cells in rows.items() if family not in ("model_type", "---")}
    assert set(rows) == {*FAMILIES, *MORE_FAMILIES, *REFUSED}
    for family, (_, _, _, name, tokens, kernels, when, _) in rows.items():
        assert when.strip() == ("by hand" if family in MORE_FAMILIES else "tests")
        if family in REFUSED:
            assert tokens.strip().startswith("refused: ")
        else:
            assert (tokens.strip(), name.strip()[-1]) == ("equal", "`")
            assert kernels.strip() in ("native", "torch")
