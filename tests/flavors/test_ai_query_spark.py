"""``ai_query`` over columns of Spark, equal to that over tables of pandas. Needs pyspark and Java."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.batch import ai_query
from mlflow_llm.flavors import llm

PARAMETERS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def root(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir)
    return str(path)


def test_rows_are_those_of_pandas(spark: Any, root: str) -> None:
    """Texts, messages and bodies have the answers of pandas' rows, in frames and as a column; nulls have none."""
    from pyspark.sql import functions

    from mlflow_llm.spark import ai_query as column

    rows = [(number, f"number {number}" if number != 3 else None) for number in range(9)]
    own = ai_query(pd.DataFrame(rows, columns=["id", "ask"]), root, "ask", model_parameters=PARAMETERS)
    expected = dict(zip(own["id"], own["response"], strict=True))
    assert expected[3] is None
    frame = spark.createDataFrame(rows, "id int, ask string").repartition(2)
    found = ai_query(frame, root, "ask", model_parameters=PARAMETERS)
    assert {row.id: row.response for row in found.collect()} == expected
    user = functions.struct(functions.lit("user").alias("role"), functions.col("ask").alias("content"))
    asked = frame.where("ask is not null").select("id", functions.array(user).alias("messages"))
    asked = asked.withColumn("body", functions.struct("messages", functions.lit(4).alias("max_tokens")))
    both = asked.select(
        "id",
        column(root, "messages", model_parameters=PARAMETERS).alias("messages"),
        column(root, functions.col("body"), model_parameters={**PARAMETERS, "max_tokens": 1}).alias("body"),
    ).collect()
    assert {row.id: row.messages for row in both} == {i: text for i, text in expected.items() if i != 3}
    assert {row.id: row.body for row in both} == {i: text for i, text in expected.items() if i != 3}


def test_errors_are_raised_or_kept_by_row(spark: Any, root: str) -> None:
    """A refused row is a struct with its errorMessage, as in pandas; else it fails the job, named by its place."""
    rows = [("number 0", 4), ("number 1", -1), (None, 4)]
    frame = spark.createDataFrame(rows, "content string, max_tokens int").coalesce(1)
    body = "if(content is null, null, struct(array(struct('user' as role, content)) as messages, max_tokens)) as ask"
    bodies = frame.selectExpr(body)
    given = {"temperature": 0, "ignore_eos": True}
    found = ai_query(bodies, root, "ask", fail_on_error=False, model_parameters=given).collect()
    own = [
        None if content is None else {"messages": [{"role": "user", "content": content}], "max_tokens": maximum}
        for content, maximum in rows
    ]
    expected = ai_query(pd.DataFrame({"ask": own}), root, "ask", fail_on_error=False, model_parameters=given)
    assert [row.response.asDict() for row in found] == expected["response"].tolist()
    assert "max_tokens" in found[1].response.errorMessage
    with pytest.raises(Exception, match="partition 0, row 1: max_tokens: -1"):
        ai_query(bodies, root, "ask", model_parameters=given).collect()


def test_vectors_replies_and_formats(spark: Any, root: str, bert_dir: Path, tmp_path: Path) -> None:
    """Vectors are arrays of floats, equal to those of pandas; replies are JSON; a response_format may be JSON."""
    llm.save_model(tmp_path / "m", bert_dir)
    embedder = str(tmp_path / "m")
    [vector] = ai_query(pd.DataFrame({"ask": ["a"]}), embedder, "ask", return_type="embedding")["response"]
    frame = spark.createDataFrame([("a",)], ["ask"]).coalesce(1)
    [row] = ai_query(frame, embedder, "ask", return_type="embedding", fail_on_error=False).collect()
    assert row.response.result == pytest.approx(vector, rel=1e-6)
    [row] = ai_query(frame, root, "ask", return_type="json", model_parameters=PARAMETERS, output="reply").collect()
    assert json.loads(row.reply)["usage"]["completion_tokens"] == 4
    form = json.dumps({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}})
    [row] = ai_query(frame, root, "ask", response_format=form).collect()
    assert json.loads(row.response) in ("yes", "no")


def test_a_row_is_asked_once(spark: Any, root: str) -> None:
    """Two uses of an answer are two fields of one reply: Spark does not ask the row again for the second."""
    frame = spark.createDataFrame([("a",)], ["ask"]).coalesce(1)
    given = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    replies = ai_query(frame, root, "ask", return_type="json", fail_on_error=False, model_parameters=given)
    [row] = replies.selectExpr("response.result as one", "response.result as other").collect()
    assert json.loads(row.one)["id"] == json.loads(row.other)["id"]


def test_wrong_arguments_are_named(spark: Any, root: str) -> None:
    """An argument that is not allowed is refused here, and not by a task."""
    from mlflow_llm.spark import ai_query as column

    frame = spark.createDataFrame([("a",)], ["ask"])
    with pytest.raises(MlflowException, match=r"request: 'nothing' is not allowed; expected a column: ask"):
        ai_query(frame, root, "nothing")
    with pytest.raises(MlflowException, match=r"request: 3 is not allowed; expected a column of Spark"):
        column(root, 3)
    with pytest.raises(MlflowException, match=r"return_type: 'xml'"):
        column(root, "ask", "xml")  # type: ignore[arg-type]
