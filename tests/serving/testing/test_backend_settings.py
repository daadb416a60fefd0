"""A backend's own settings: namespaced, checked like all others, and refused by every other backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantCore, InstantModel, write_model


def test_a_backend_reads_the_settings_under_its_name(tmp_path: Path) -> None:
    """Settings under a backend's name replace the model's, and others stay."""
    bundle = write_model(tmp_path / "model", InstantModel(step_delay=5.0, vocab_size=77))
    core = InstantCore(bundle, EngineSettings(backend={"instant": {"step_delay": 0.0}}))
    assert (core.model.step_delay, core.model.vocab_size) == (0.0, 77)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"instant": {"step_delay": -1}}, r"backend\.instant\.step_delay: -1 is not allowed; expected a number from 0"),
        (
            {"instant": {"speed": 1}},
            r"backend\.instant\.speed: .*no such setting; expected one of step_delay, load_delay",
        ),
        ({"vllm": {}}, r"backend\.vllm: .* expected settings of this engine alone, which is 'instant'"),
    ],
)
def test_unknown_backend_settings_are_refused(tmp_path: Path, given: dict[str, object], message: str) -> None:
    """An unknown setting, or another backend's, is refused with field, value and what is allowed."""
    bundle = write_model(tmp_path / "model")
    with pytest.raises(InvalidField, match=message):
        InstantCore(bundle, EngineSettings(backend=given))


def test_our_own_engine_has_no_settings_of_its_own(tiny_bundle: Bundle) -> None:
    """Our own engine has no settings under its name and refuses those of another backend."""
    for given in ({"instant": {"step_delay": 1}}, {"native": {"speed": 1}}):
        with pytest.raises(InvalidField, match="backend"):
            EngineCore(tiny_bundle, EngineSettings(backend=given))
