"""Names that settings had in earlier releases."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.settings import EngineSettings

OLD = "picture_cache"  # the old name of encoder_cache


def test_an_earlier_name_of_a_setting_is_read() -> None:
    """The cache of image features and asynchronous scheduling can be set by the names that they had before."""
    assert EngineSettings.read({OLD: 4096}).encoder_cache == 4096
    assert EngineSettings.read({"launch_ahead": "none"}).async_scheduling == "none"


def test_both_names_of_a_setting_are_refused() -> None:
    """A setting that is given by its earlier and its present name is refused by both."""
    with pytest.raises(InvalidField, match=f"{OLD}.*encoder_cache"):
        EngineSettings.read({OLD: 4096, "encoder_cache": 1})


def test_errors_use_the_present_name() -> None:
    """A wrong value under the earlier name is refused by the present one."""
    with pytest.raises(InvalidField, match="encoder_cache"):
        EngineSettings.read({OLD: -1})


def test_a_setting_that_is_gone_keeps_its_only_value() -> None:
    """A model that was logged with compile=False loads; any other value is no setting."""
    assert EngineSettings.read({"compile": False}) == EngineSettings()
    with pytest.raises(InvalidField, match="compile"):
        EngineSettings.read({"compile": True})
