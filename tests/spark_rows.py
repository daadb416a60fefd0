"""Rows of Spark by ``llm.spark_udf`` and ``ai_query``, equal to those of ``predict``, some of them bad.

Two executors of Spark, processes of their own, share one engine. CI has a few rows
(``tests/flavors/load/test_spark.py``); by hand, with pyspark and Java:

    python tests/spark_rows.py --rows 10000
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import psutil

from mlflow_llm.batch import ai_query
from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli.models.running import engines

GIVEN: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SCHEMA = "id int, prompt string, max_tokens int"
BAD = 50  # one in so many rows is refused: it asks for tokens before the first
WORKERS = "pyspark.daemon"


class Seen(NamedTuple):
    """Engines and workers that a run has seen: the most engines ``at_once``, the ``places`` that engines had, and the
    ``workers`` of Spark that asked."""

    at_once: int
    places: set[str]
    workers: set[int]


class Watch(threading.Thread):
    """A thread that notes every engine process of a model, and Spark's Python processes, until it is ended."""

    def __init__(self, root: str) -> None:
        super().__init__(daemon=True)
        self._root = os.path.realpath(root)
        self.seen = Seen(0, set(), set())
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            running = [one for one in engines() if os.path.realpath(one.folder).startswith(self._root)]
            self.seen.places.update(engine.place for engine in running)
            self.seen = self.seen._replace(at_once=max(self.seen.at_once, len(running)))
            for process in psutil.Process().children(recursive=True):
                try:
                    if WORKERS in process.cmdline():
                        self.seen.workers.add(process.pid)
                except psutil.Error:
                    continue

    def end(self) -> Seen:
        self._ended.set()
        self.join()
        return self.seen


def rows_of(count: int) -> list[tuple[int, str, int]]:
    """Return rows with prompts and lengths that differ, of which every ``BAD``th is refused."""
    draw = random.Random(0)
    return [(i, f"number {draw.randrange(10**6)}", -1 if i % BAD == 7 else draw.randint(1, 6)) for i in range(count)]


def own_answers(root: str, rows: list[tuple[int, str, int]]) -> dict[int, str | None]:
    """Return what ``predict`` answers; None for a refused row."""
    with llm.closing(mlflow.pyfunc.load_model(root)) as model:
        requests = [{"prompt": prompt, "max_tokens": maximum} for _, prompt, maximum in rows]
        texts = model.predict(requests, params=GIVEN | {"output": "text", "on_error": "null"})
    return dict(zip((row[0] for row in rows), texts, strict=True))


def compare(spark: Any, root: str, rows: list[tuple[int, str, int]], partitions: int) -> Seen:
    """Assert that every row has the answer of ``predict``, by both functions. Return the processes that were seen."""
    expected = own_answers(root, rows)
    frame = spark.createDataFrame(rows, SCHEMA).repartition(partitions)
    watch = Watch(root)
    watch.start()
    try:
        ask = llm.spark_udf(spark, root, on_error="null", **GIVEN)
        found = frame.withColumn("answer", ask("prompt", "max_tokens")).collect()
        assert {row.id: row.answer for row in found} == expected
        bodies = frame.selectExpr("id", "struct(prompt, max_tokens) as body")
        asked = ai_query(bodies, root, "body", fail_on_error=False, model_parameters=GIVEN).collect()
        assert {row.id: row.response.result for row in asked} == expected
        refused = [row.id for row in asked if "max_tokens: -1" in (row.response.errorMessage or "")]
        assert sorted(refused) == [i for i, text in expected.items() if text is None]
    finally:
        seen = watch.end()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10000)
    parser.add_argument("--executors", type=int, default=2)
    parser.add_argument("--model", help="a Hugging Face directory; by default a random Llama of a few kilobytes")
    args = parser.parse_args()
    from flavor_models import TEMPLATE, byte_tokenizer, tiny_llama
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLFLOW_LLM_STATE"] = f"{folder}/state"  # engines of others are not counted
        os.environ["SPARK_WORKER_DIR"] = f"{folder}/executors"
        model = args.model
        if model is None:
            model = f"{folder}/llama"
            tiny_llama().save_pretrained(model)
            byte_tokenizer(chat_template=TEMPLATE).save_pretrained(model)
        root = f"{folder}/model"
        llm.save_model(Path(root), model)
        master = f"local-cluster[{args.executors},1,1024]"
        builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
        session = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "1000").getOrCreate()
        began = time.perf_counter()
        try:
            rows = rows_of(args.rows)
            seen = compare(session, root, rows, 4 * args.executors)
        finally:
            session.stop()
        assert seen.at_once == len(seen.places) == 1, seen
        bad = sum(maximum < 0 for _, _, maximum in rows)
        print(
            f"{args.rows} rows, {bad} of them bad, by {args.executors} executors equal those of predict, by both "
            f"functions: one engine process at any time, {len(seen.workers)} processes of Python asked it, "
            f"{time.perf_counter() - began:.0f} s"
        )


if __name__ == "__main__":
    main()
