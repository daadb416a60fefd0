"""Fixtures over the kernels of every instruction set of this CPU's architecture (test_arm.py has another's)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlflow_llm.serving.engine.native.library import INSTRUCTION_SETS, use_instruction_set, use_threads, why_not


@pytest.fixture(params=list(INSTRUCTION_SETS))
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the requesting test once with each instruction set; those that the CPU lacks are skipped by name."""
    name: str = request.param
    reason = why_not(name)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    use_instruction_set(name)
    use_threads(2)
    yield name
    use_instruction_set("")
