"""Build ``batch_with_spark.ipynb`` and run it: ``python notebooks/build_batch_with_spark.py``, with pyspark and Java.

It is stored with its outputs, like the quickstart. Without pyspark or Java its tables are of pandas, and it says so.
"""

from __future__ import annotations

from notebook_building import build, store

CELLS = [
    """# Batch with Spark

Ask a model once per row of a table of Spark: by a server, with the answers and errors of each row and the bill of the
whole job, and by a model that Spark's tasks load themselves. It needs pyspark and Java, and the weights of the quickstart
(`python examples/quickstart/fetch_weights.py`). Without Spark, the same calls run on tables of pandas.""",
    """import atexit
import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import mlflow
import pandas as pd
import requests

from mlflow_llm.batch import ai_query
from mlflow_llm.flavors import llm

logging.getLogger("mlflow").setLevel(logging.ERROR)
models = Path(os.environ.get("MLFLOW_LLM_QUICKSTART_MODELS", "../.cache/models")).resolve()
folder = tempfile.TemporaryDirectory()  # goes with the kernel
store = Path(folder.name)
model = str(store / "assistant")
llm.save_model(model, models / "smollm2", link_files=True)

spark = None
if importlib.util.find_spec("pyspark") is None or shutil.which("java") is None:
    print("No pyspark or no Java here: the tables below are of pandas.")
else:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

def shown(frame):
    return frame if spark is None else frame.toPandas()""",
    """## A server

A server with a database keeps a ledger of every request.""",
    """with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{probe.getsockname()[1]}"
command = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", f"{model}=assistant", "--workers", "1"]
command += ["--port", url.rpartition(":")[2], "--database", f"sqlite:///{store / 'serving.db'}"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
atexit.register(server.terminate)  # a cell that fails leaves no server

def ready():
    try:
        return requests.get(f"{url}/ready", timeout=5).ok
    except requests.RequestException:
        return False

until = time.monotonic() + 180
while not ready():
    assert server.poll() is None and time.monotonic() < until, "the server did not start"
    time.sleep(0.2)
requests.get(f"{url}/v1/models").json()["data"][0]["id"]""",
    """## Ask once per row

`ai_query` has the arguments of Databricks' SQL function. With `fail_on_error=False` a row that is refused has its reason
beside the answers of the others: the last text is longer than the model's context. The label `job` will be on the bill.""",
    """rows = [(number, f"What is the capital of {country}?") for number, country in enumerate(["France", "Italy", "Japan"])]
rows.append((3, "What is in these books? " + "word " * 10000))
table = pd.DataFrame(rows, columns=["id", "question"])
frame = table if spark is None else spark.createDataFrame(rows, ["id", "question"]).repartition(2)
given = {"max_tokens": 16, "temperature": 0, "metadata": {"job": "capitals"}}
answered = ai_query(frame, "assistant", "question", fail_on_error=False, model_parameters=given, url=url)
if spark is not None:
    answered = answered.cache()  # Spark would ask again for each use of the answers
answers = shown(answered).sort_values("id")
fields = pd.DataFrame([dict(one) if isinstance(one, dict) else one.asDict() for one in answers["response"]])
pd.concat([answers["question"].str.slice(0, 40).reset_index(drop=True), fields], axis=1)""",
    """## The bill

The ledger has what the job used: the refused row cost nothing.""",
    """bill = requests.get(f"{url}/api/2.0/usage", params={"by": "endpoint,tags.job"}).json()
pd.DataFrame(bill["usage"])""",
    """## By a model

`llm.spark_udf` asks a model that Spark's tasks load: those of a host share one engine. A table of pandas asks it by
`predict`. A refused row is null.""",
    """if spark is None:
    with llm.closing(mlflow.pyfunc.load_model(model)) as loaded:
        messages = [{"messages": [{"role": "user", "content": text}], "max_tokens": 16} for text in table["question"]]
        texts = loaded.predict(messages, params={"temperature": 0, "output": "text", "on_error": "null"})
    own = table.assign(answer=texts)
else:
    ask = llm.spark_udf(spark, model, on_error="null", max_tokens=16, temperature=0)
    own = shown(frame.withColumn("answer", ask("question")))
own = own.sort_values("id")
assert list(own["answer"].isna()) == list(fields["result"].isna())
own.assign(question=own["question"].str.slice(0, 40)).reset_index(drop=True)""",
    """## Close""",
    """server.terminate()
server.wait(60)
if spark is not None:
    spark.stop()""",
]


if __name__ == "__main__":
    store("batch_with_spark.ipynb", build(CELLS), seconds=400)
