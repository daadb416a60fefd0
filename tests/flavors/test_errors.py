"""The errors of the flavor: serving's tree again, each class also an ``MlflowException``."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors.llm import errors
from mlflow_llm.flavors.llm.errors import raises_mlflow
from mlflow_llm.serving.interface import errors as serving


def an(cls: type[serving.ServingError]) -> serving.ServingError:
    error = cls.__new__(cls)
    serving.ServingError.__init__(error, "short", param="stop", retry_after=3.0)
    return error


@pytest.mark.parametrize("cls", serving.walk(), ids=lambda cls: cls.__name__)
def test_every_class_has_its_public_one(cls):
    """Every serving error has a public class of the same name, kind and place, with a fixed message and MLflow's
    status."""
    reported = errors.mlflow_error(an(cls))
    assert type(reported) is getattr(errors, cls.__name__)
    assert isinstance(reported, cls)
    assert isinstance(reported, MlflowException)
    assert [c.__name__ for c in type(reported).__mro__ if c.__module__ == errors.__name__] == [
        c.__name__ for c in cls.__mro__ if c.__module__ == serving.__name__
    ]
    reported.message = "Failed to predict data 'the whole prompt'"
    assert (reported.kind, reported.get_http_status_code()) == (cls.kind, cls.status)
    assert (str(reported), reported.param, reported.retry_after) == ("short", "stop", 3.0)
    assert json.loads(reported.serialize_as_json())["message"] == "short"


@pytest.mark.parametrize("cls", serving.walk(), ids=lambda cls: cls.__name__)
def test_errors_cross_processes(cls):
    """Pickled and copied errors keep all their fields."""
    reported = errors.mlflow_error(an(cls))
    for again in (pickle.loads(pickle.dumps(reported)), copy.deepcopy(reported)):
        assert type(again) is type(reported)
        assert (again.message, again.error_code, again.param) == (reported.message, reported.error_code, reported.param)
        assert str(again) == "short"


def test_serving_errors_stay_its_own():
    """A serving error that crossed a process stays serving's, whether the flavor is imported or not."""
    assert {type(serving.from_kind(cls.kind, "x")).__module__ for cls in serving.walk()} == {serving.__name__}


def test_packaging_errors_are_mlflows_too():
    """A packaging error has MLflow's code of a bad parameter and is a ``ValueError``; converted twice it stays one."""

    @raises_mlflow
    def load() -> None:
        raise serving.PackagingError("model: no")

    with pytest.raises(errors.PackagingError, match=r"^model: no$") as caught:
        raises_mlflow(load)()
    assert isinstance(caught.value, MlflowException)
    assert isinstance(caught.value, ValueError)
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
    assert pickle.loads(pickle.dumps(caught.value)).error_code == "INVALID_PARAMETER_VALUE"
