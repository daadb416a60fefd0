"""Every setting says what it does, in the docstring that the reference is made of."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.interface.dialect_settings import DialectSettings
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.interface.validated_struct import Checked


@pytest.mark.parametrize("settings", [EngineSettings, ServerSettings, DialectSettings])
def test_every_setting_says_what_it_does(settings: type[Checked]) -> None:
    """Every setting is described, and every description is of an existing setting."""
    meanings = settings.meanings()
    assert list(meanings) == [name for name, _, _ in settings.described()]
    assert [name for name, meaning in meanings.items() if not meaning] == []
    told = [line for base in settings.__mro__ for line in (base.__doc__ or "").splitlines()]
    told = [line.strip().partition(":")[0] for line in told if line.startswith(" " * 8) and line[8] != " "]
    assert sorted(told) == sorted(meanings)


def test_meanings_of_several_lines_are_one() -> None:
    """A description of several lines is joined into one."""

    class Two(Checked, frozen=True, kw_only=True):
        """Two settings.

        Attributes:
            first: begins here
                and goes on.
            second: one line
        """

        first: int = 1
        second: int = 2

    assert Two.meanings() == {"first": "begins here and goes on.", "second": "one line"}
