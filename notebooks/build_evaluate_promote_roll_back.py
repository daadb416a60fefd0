"""Build ``evaluate_promote_roll_back.ipynb`` and run it: ``python notebooks/build_evaluate_promote_roll_back.py``.

It is stored with its outputs, like the quickstart, whose weights and adapters it needs.
"""

from __future__ import annotations

from notebook_building import build, store

CELLS = [
    """# Evaluate, promote, roll back

An alias of MLflow's registry moves to a new version only if that one is better, and the endpoint of a server follows the
alias: by a canary, which is rolled back if it breaks a bound. The weights and adapters are those of the quickstart
(`python examples/quickstart/fetch_weights.py && python examples/quickstart/train_adapters.py`).""",
    """import atexit
import json
import logging
import os
import shlex
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

from mlflow_llm.flavors import llm

logging.getLogger("mlflow").setLevel(logging.ERROR)
logging.getLogger("alembic").setLevel(logging.ERROR)
models = Path(os.environ.get("MLFLOW_LLM_QUICKSTART_MODELS", "../.cache/models")).resolve()
folder = tempfile.TemporaryDirectory()  # goes with the kernel
store = Path(folder.name)
mlflow.set_tracking_uri(f"sqlite:///{store}/mlflow.db")
experiment = mlflow.create_experiment("promotions", artifact_location=str(store / "models"))
_ = mlflow.set_experiment(experiment_id=experiment)
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # where LiteLLM is installed, it would fetch a list of prices
pd.set_option("display.max_colwidth", None)

def mlflow_llm(line):
    \"\"\"Run a command in the store's folder, and return its exit status.\"\"\"
    command = [sys.executable, "-m", "mlflow_llm.serving.cli", *shlex.split(line)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=store)
    print(done.stdout, end="")
    assert done.returncode in (0, 3), done.stderr
    return done.returncode""",
    """## Versions

Answers are to be JSON that a program can read. Version 1 is the base model; in versions 2 and 3, an adapter answers unless
a request names another. The alias `champion` is version 1.""",
    """adapters = {name: models / "adapters" / name for name in ("json", "pirate")}
for default in (None, "json", "pirate"):
    llm.log_model(
        models / "smollm2",
        name="assistant",
        adapters=adapters,
        default_adapter=default,
        registered_model_name="assistant",
    )
registry = mlflow.MlflowClient()
registry.set_registered_model_alias("assistant", "champion", "1")""",
    """## A server that follows the alias

The endpoint looks for the alias every second here; the default is every minute. A new version gets half of the traffic for
a second and four requests. It must have a metric in MLflow, `as_json/mean`, of at least 0.5.""",
    """with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{probe.getsockname()[1]}"
command = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", "--workers", "1", "--alias-poll", "1"]
command += ["--port", url.rpartition(":")[2], "--database", f"sqlite:///{store / 'serving.db'}"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
atexit.register(server.terminate)  # a cell that fails leaves no server
os.environ["MLFLOW_LLM_URL"] = url  # the server of the commands below

def wait(condition):
    until = time.monotonic() + 180
    while not condition():
        assert server.poll() is None and time.monotonic() < until, "the server did not get there"
        time.sleep(0.2)

def is_up():
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False

wait(is_up)
canary = {"traffic_percentage": 50, "duration_s": 1, "min_requests": 4, "min_scores": {"as_json/mean": 0.5}}
_ = mlflow_llm(f"endpoints create chat -m assistant@champion=main --follow-alias --canary '{json.dumps(canary)}'")""",
    """## Promote if it is better

A scorer is a function of yours, or one of MLflow's. Both versions answer the same requests, and the alias moves only if the
mean score of the new one is higher by the margin.""",
    """(store / "my_scorers.py").write_text('''
import json

def as_json(outputs):
    try:
        return "answer" in json.loads(outputs)
    except ValueError:
        return False
''')
asked = ["Italy", "Norway", "Peru", "Kenya", "Poland", "Cuba", "India", "Chile"]
questions = [{"role": "user", "content": f"What is the capital of {country}?"} for country in asked]
lines = [{"inputs": {"messages": [question], "temperature": 0, "max_tokens": 32}} for question in questions]
(store / "data.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
options = "--alias champion --if-better --margin 0.1 --scorer my_scorers:as_json --data data.jsonl --min-requests 8"
status = mlflow_llm(f"promote models:/assistant/2 {options}")
assert status == 0""",
    """## The endpoint follows

Requests come in while it does. A part of them is answered by the canary; then version 2 gets all of them. None fails.""",
    """def history():
    return requests.get(f"{url}/api/2.0/serving-endpoints/chat/config-versions").json()["versions"]

def ask_until(*states):
    \"\"\"Ask until the newest versions of the config have these states; return who answered, and what.\"\"\"
    answers = []

    def has_come():
        question = questions[len(answers) % len(questions)]
        body = {"model": "chat", "messages": [question], "temperature": 0, "max_tokens": 32}
        reply = requests.post(f"{url}/v1/chat/completions", json=body)
        reply.raise_for_status()
        text = reply.json()["choices"][0]["message"]["content"]
        by = "canary" if "~" in reply.headers["served-model-name"] else "main"
        answers.append({"question": question["content"], "answered by": by, "answer": text})
        return tuple(one["state"] for one in history()[: len(states)]) == states

    wait(has_come)
    return pd.DataFrame(answers)

answers = ask_until("active", "promoted", "superseded")
assert "canary" in set(answers["answered by"])
answers.groupby("answered by").head(2)""",
    """## Not better

Version 3 answers as a pirate. The alias stays, and the exit status is 3, by which a pipeline stops.""",
    """status = mlflow_llm(f"promote models:/assistant/3 {options}")
assert status == 3
registry.get_model_version_by_alias("assistant", "champion").version""",
    """## Roll back

Somebody moves the alias nevertheless. The evaluation has left its scores at the version's logged model, so that the endpoint
finds the bound broken before version 3 answers anybody.""",
    """mlflow_llm("promote models:/assistant/3 --alias champion")
answers = ask_until("rolled_back", "active", "promoted")
assert set(answers["answered by"]) == {"main"}
_ = mlflow_llm("endpoints history chat")""",
    """## Close""",
    """server.terminate()
_ = server.wait(60)""",
]


if __name__ == "__main__":
    store("evaluate_promote_roll_back.ipynb", build(CELLS), seconds=400)
