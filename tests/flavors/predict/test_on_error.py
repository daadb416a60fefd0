"""``on_error`` of predict: the value in place of a request that is refused or fails."""

from __future__ import annotations

import logging

import mlflow
import numpy
import pandas
import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.predict.session import Session
from mlflow_llm.serving.interface.errors import EngineDied

ROWS = [
    {"prompt": "a", "max_tokens": 2, "ignore_eos": True},
    {"prompt": "a secret", "max_token": 2},
    {"prompt": 5},
    {"prompt": "b", "max_tokens": 3, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def model(llama_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir)
    loaded = mlflow.pyfunc.load_model(str(path), model_config={"in_process": True})
    yield loaded
    loaded.get_raw_model().close()


def test_null_and_return(model, caplog):
    """Other rows are answered in order; a failed one is None, or an error object that names the field. The log counts
    failures without showing a prompt."""
    with caplog.at_level(logging.WARNING):
        nulls = model.predict(ROWS, params={"on_error": "null"})
    assert "2 of 4 requests failed; row 1: max_token" in caplog.text
    assert "secret" not in caplog.text
    reported = model.predict(ROWS, params={"on_error": "return"})
    assert [row and row["usage"]["completion_tokens"] for row in nulls] == [2, None, None, 3]
    assert [row.get("error", {}).get("param") for row in reported] == [None, "max_token", "prompt", None]
    assert "did you mean 'max_tokens'" in reported[1]["error"]["message"]
    assert model.predict([], params={"on_error": "null"}) == []
    assert model.predict(ROWS[1], params={"on_error": "null"}) is None


@pytest.mark.parametrize("kind", [list, tuple, pandas.Series, lambda rows: numpy.array(rows, dtype=object)])
@pytest.mark.parametrize("wrong", [None, 5, float("nan"), ["a"]], ids=repr)
def test_an_invalid_entry(model, kind, wrong):
    """An entry of a list or Series that is not a request becomes null or its error; by default it is raised by row."""
    given, params = kind(["abc", wrong]), {"max_tokens": numpy.int64(2), "ignore_eos": True}
    answered, null = model.predict(given, params=params | {"on_error": "null"})
    assert (answered["usage"]["completion_tokens"], null) == (2, None)
    _, reported = model.predict(given, params=params | {"on_error": "return"})
    assert reported["error"]["param"] == "body"
    assert "a text, or an object with messages, prompt or input" in reported["error"]["message"]
    with pytest.raises(MlflowException, match=r"row 1: body: .* is not allowed; expected a text, or an object"):
        model.predict(given, params=params)


def test_a_row_that_fails_while_it_runs(model, monkeypatch):
    """A row that fails while it runs has its own error alone in its place."""
    plain = Session.reply

    def reply(self, request, stop=None):
        if request.sampling.max_tokens == 2:
            raise EngineDied("it ended")
        return plain(self, request, stop)

    monkeypatch.setattr(Session, "reply", reply)
    died, lived = model.predict([ROWS[0], ROWS[3]], params={"on_error": "return"})
    assert (died["error"]["code"], lived["usage"]["completion_tokens"]) == ("engine_died", 3)
    with pytest.raises(MlflowException, match="row 0: it ended"):
        model.predict([ROWS[0], ROWS[3]])


@pytest.mark.parametrize("params", [{"on_error": "raise"}, {"on_error": None}, None])
def test_the_default_raises(model, params):
    """The first invalid row is raised by its number by default."""
    with pytest.raises(MlflowException, match="row 1: max_token"):
        model.predict(ROWS, params=params)


def test_errors_raised_regardless_of_on_error(model):
    """An unknown value, unknown parameters, streams and input without requests are raised regardless of on_error."""
    with pytest.raises(MlflowException, match=r"params\.on_error: 'ignore' .* \"null\""):
        model.predict(ROWS, params={"on_error": "ignore"})
    with pytest.raises(MlflowException, match=r"params\.foo"):
        model.predict(ROWS, params={"on_error": "null", "foo": 1})
    with pytest.raises(MlflowException, match="on_error: it is for predict"):
        list(model.predict_stream(ROWS[0], params={"on_error": "null"}))
    with pytest.raises(MlflowException, match="body: 5"):
        model.predict(5, params={"on_error": "null"})


def test_a_closed_model_raises(llama_dir, tmp_path):
    """A closed model raises instead of giving null for every row."""
    llm.save_model(tmp_path / "m", llama_dir)
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "m"), model_config={"in_process": True})
    loaded.get_raw_model().close()
    with pytest.raises(MlflowException, match="closed"):
        loaded.predict(ROWS, params={"on_error": "null"})
