"""``spark_udf`` with Spark itself: rows as ``predict`` answers them, and nulls for bad ones. Needs pyspark and Java."""

from __future__ import annotations

import json

import mlflow
import pytest
import spark_rows
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm

PARAMS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
ROWS = 200
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def root(llama_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir)
    return str(path)


def test_rows_are_those_of_predict(spark, root):
    """Every row has the text that ``predict`` gives it, and a refused one is null, by ``ai_query`` too; the tasks share
    one engine."""
    rows = spark_rows.rows_of(ROWS)
    seen = spark_rows.compare(spark, root, rows, 2)
    assert seen.at_once == 1
    assert len(seen.places) == 1
    frame = spark.createDataFrame([("number 1",)], ["prompt"])
    reply = llm.spark_udf(spark, root, output="reply", **PARAMS)
    [row] = frame.withColumn("answer", reply("prompt")).collect()
    assert json.loads(row.answer)["usage"]["completion_tokens"] == 4


def test_vectors(spark, bert_dir, tmp_path):
    """ "embedding" gives an array of floats, equal to the vector of ``predict``; a null text gives a null."""
    llm.save_model(tmp_path / "m", bert_dir)
    frame = spark.createDataFrame([("a",), (None,)], "input string").coalesce(1)
    embed = llm.spark_udf(spark, str(tmp_path / "m"), output="embedding", on_error="null")
    found = frame.withColumn("vector", embed("input")).collect()
    with llm.closing(mlflow.pyfunc.load_model(str(tmp_path / "m"))) as model:
        own = model.predict(["a"], params={"output": "embedding"})[0]
    assert found[0].vector == pytest.approx(own)
    assert found[1].vector is None


@pytest.mark.parametrize(
    ("given", "message"), [({"output": "texts"}, "output: 'texts'"), ({"on_error": 1}, "on_error")]
)
def test_arguments_are_checked(given, message):
    """A wrong argument is refused before Spark is asked."""
    with pytest.raises(MlflowException, match=f"{message}.* is not allowed; expected one of"):
        llm.spark_udf(None, "models:/a/1", **given)
