"""``output`` of predict (whole replies, texts or vectors), and the column ``inputs`` of MLflow's evaluation."""

from __future__ import annotations

import json

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm

PARAMS = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def root(llama_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir, in_process=True)
    return str(path)


@pytest.fixture(scope="module")
def model(root):
    with llm.closing(mlflow.pyfunc.load_model(root)) as loaded:
        yield loaded


def texts_of(replies):
    return [reply["choices"][0]["message"]["content"] for reply in replies]


def test_text_and_json(model):
    """ "text" gives what the reply's first choice says, for one request and for rows; "json" the reply as a text."""
    expected = texts_of(model.predict(["Hi", "Ho"], params=PARAMS))
    assert model.predict(["Hi", "Ho"], params=PARAMS | {"output": "text"}) == expected
    assert model.predict("Hi", params=PARAMS | {"output": "text"}) == expected[0]
    assert model.predict("Hi", params=PARAMS | {"output": "text", "on_error": "null"}) == expected[0]
    assert texts_of(map(json.loads, model.predict(["Hi", "Ho"], params=PARAMS | {"output": "json"}))) == expected


def test_embedding(bert_dir, tmp_path):
    """ "embedding" gives the vector of each text as floats."""
    llm.save_model(tmp_path / "m", bert_dir, in_process=True)
    with llm.closing(mlflow.pyfunc.load_model(str(tmp_path / "m"))) as model:
        [reply] = model.predict(["a"])
        [vector] = model.predict(["a"], params={"output": "embedding"})
        assert np.allclose(vector, reply["data"][0]["embedding"])
        with pytest.raises(MlflowException, match=r"params.output: 'text' is not allowed; expected 'reply' for"):
            model.predict(["a"], params={"output": "text"})


def test_what_is_not_one_text_is_refused(model, root):
    """A reply of several texts or none, an unknown form, and a stream are refused by the parameter's name."""
    for body, output, message in (
        ({"messages": MESSAGES, "n": 2}, "text", "'reply' for a request with 2 results"),
        ({"messages": MESSAGES}, "embedding", "'reply' for a request of chat"),
        ({"messages": MESSAGES}, "texts", "'texts' is not allowed; expected one of"),
    ):
        with pytest.raises(MlflowException, match=f"params.output: .*{message}"):
            model.predict(body, params={"output": output})
    with pytest.raises(MlflowException, match=r"params.output: 'text' is not allowed; expected 'reply': a stream"):
        list(model.predict_stream({"messages": MESSAGES}, params={"output": "text"}))
    with pytest.raises(MlflowException, match=r"output: 'texts' is not allowed; expected one of reply, text"):
        mlflow.pyfunc.load_model(root, model_config={"output": "texts"})


def test_the_column_inputs(model):
    """A column ``inputs`` holds texts, messages or requests; other columns are fields, and a null is refused by row."""
    expected = texts_of(model.predict(["Hi"], params=PARAMS))[0]
    ask = PARAMS | {"output": "text"}
    for cell in ("Hi", MESSAGES, {"messages": MESSAGES}):
        frame = pd.DataFrame({"inputs": [cell, "Ho"]})
        assert model.predict(frame, params=ask)[0] == expected
    assert len(model.predict(pd.DataFrame({"inputs": ["Hi"], "max_tokens": [1]}), params=ask)[0]) <= len(expected)
    with pytest.raises(MlflowException, match="row 1: inputs: None is not allowed; expected a text"):
        model.predict(pd.DataFrame({"inputs": ["Hi", None]}), params=ask)
    with pytest.raises(MlflowException, match="answer: 'x' is not allowed: no such field"):
        model.predict(pd.DataFrame({"inputs": ["Hi"], "answer": ["x"]}), params=ask)


def test_evaluate_scores_the_texts(store, root):
    """``mlflow.models.evaluate`` of a model's URI sees its texts."""
    frame = pd.DataFrame({"inputs": ["Hi", "Ho"], "truth": ["x", "y"]})
    with llm.closing(mlflow.pyfunc.load_model(root)) as model:
        expected = model.predict(["Hi", "Ho"], params={"output": "text", **PARAMS})
    config = {"output": "text", "defaults": PARAMS}
    seen = []

    def same(predictions, targets):
        seen[:] = list(predictions)
        return float((predictions == targets).mean())

    metric = mlflow.models.make_metric(eval_fn=same, greater_is_better=True, name="same")
    result = mlflow.models.evaluate(
        root, frame, targets="truth", model_config=config, extra_metrics=[metric], evaluators="default"
    )
    assert seen == expected
    assert result.metrics["same"] == 0.0


def test_a_row_without_a_prompt_reads_well(model):
    """A row that has only other fields is told what it lacks; its fields are not shown as a value."""
    rows = [{"prompt": "a", "max_tokens": 1}, {"max_tokens": 3}]
    with pytest.raises(
        MlflowException, match=r"row 1: body: it has max_tokens alone; expected exactly one of messages"
    ):
        model.predict(rows)
    with pytest.raises(MlflowException, match=r"body: it has messages, prompt; expected exactly one of messages"):
        model.predict({"prompt": "a", "messages": MESSAGES})


def test_dir_shows_the_api_alone():
    """``dir(llm)`` lists the documented names, each of which exists, and nothing else."""
    names = dir(llm)
    assert {"load_model", "log_model", "save_model", "spark_udf"} <= set(names)
    assert all(not name.startswith("_") and hasattr(llm, name) for name in names)
    assert "importlib" not in names
