"""Build ``adapters_from_training_to_split.ipynb`` and run it, with the weights of the quickstart.

``python notebooks/build_adapters_from_training_to_split.py`` stores it with its outputs, like the quickstart.
"""

from __future__ import annotations

from notebook_building import build, store

CELLS = [
    """# Adapters, from training to an A/B split

Train two LoRA adapters with peft in two MLflow runs, log and register each as a version of one model, and serve both
versions behind one endpoint: half of the requests go to each, every answer says which version gave it, and the ledger
has what each used. It needs the weights of the quickstart (`python examples/quickstart/fetch_weights.py`).""",
    """import atexit
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin are slow beside other work

import mlflow
import pandas as pd
import requests
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from mlflow_llm.flavors import llm

logging.getLogger("mlflow").setLevel(logging.ERROR)
logging.getLogger("alembic").setLevel(logging.ERROR)
transformers_logging.disable_progress_bar()
pd.set_option("display.max_colwidth", 80, "display.width", 160)

models = Path(os.environ.get("MLFLOW_LLM_QUICKSTART_MODELS", "../.cache/models")).resolve()
folder = tempfile.TemporaryDirectory()  # goes with the kernel
store = Path(folder.name)
os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{store}/mlflow.db"  # for the server too
experiment = mlflow.create_experiment("split", artifact_location=str(store / "models"))
_ = mlflow.set_experiment(experiment_id=experiment)""",
    """## The data

The same questions with answers in two styles. The versions differ in nothing else.""",
    """capitals = {
    "Italy": "Rome", "Spain": "Madrid", "Egypt": "Cairo", "Greece": "Athens",
    "Portugal": "Lisbon", "Austria": "Vienna", "Cuba": "Havana", "Kenya": "Nairobi",
}
styles = {"terse": "{city}.", "warm": "What a lovely question! The capital of {country} is {city}."}
data = {
    style: pd.DataFrame(
        [(f"What is the capital of {c}?", text.format(country=c, city=city)) for c, city in capitals.items()],
        columns=["question", "answer"],
    )
    for style, text in styles.items()
}
data["warm"].head(2)""",
    """## The base

It is registered once. The versions of the adapters will refer to it instead of storing it again.""",
    """base = llm.log_model(model=models / "smollm2", name="base", registered_model_name="smollm2")
base.registered_model_version""",
    """## Train, log and register

A plain loop of PyTorch: eight steps of rank 8, from a fixed seed. `log_model` takes the `PeftModel` as it is. Because
the run that logs it has the training's dataset and metrics, it is recorded as the run that trained the adapter.""",
    """tokenizer = AutoTokenizer.from_pretrained(models / "smollm2")
weights = AutoModelForCausalLM.from_pretrained(models / "smollm2", dtype=torch.float32)
settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
steps, batch_size, learning_rate, ignored = 8, 4, 1e-3, -100

def encoded(row):
    message = [{"role": "user", "content": row.question}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids, answer = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, f"{row.answer}<|im_end|>")
    )
    return torch.tensor(ids + answer), torch.tensor([ignored] * len(ids) + answer)

def padded(tensors, value):
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

def train(frame):
    torch.manual_seed(7)
    model = get_peft_model(weights, LoraConfig(task_type="CAUSAL_LM", **settings)).train()
    rows = [encoded(row) for row in frame.itertuples()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate, weight_decay=0)
    for step in range(steps):
        ids, labels = zip(*[rows[i] for i in torch.randperm(len(rows))[:batch_size]])
        labels = padded(labels, ignored)
        mask = padded([torch.ones_like(one) for one in ids], 0)
        loss = model(input_ids=padded(ids, tokenizer.eos_token_id), attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mlflow.log_metric("loss", loss.item(), step=step)
    return model.eval()

logged = {}
for style, frame in data.items():
    with mlflow.start_run(run_name=style):
        mlflow.log_params({"steps": steps, "learning_rate": learning_rate, "rank": settings["r"]})
        mlflow.log_input(mlflow.data.from_pandas(frame, name=f"capitals-{style}"), context="training")
        model = train(frame)
        logged[style] = llm.log_model(
            base="models:/smollm2/1",
            name="assistant",
            adapters={"style": model},
            default_adapter="style",
            defaults={"temperature": 0, "max_tokens": 24},
            registered_model_name="assistant",
        )
    weights = model.unload()  # the base without the adapter, for the next one""",
    """## Where each version comes from

The registry knows the run of each adapter, its dataset, and its base. `mlflow-llm models show assistant/1` shows it in
a terminal.""",
    """client = mlflow.MlflowClient()
def origin(info):
    facts = client.get_logged_model(info.model_id).params
    run = client.get_run(facts["llm.adapter.style.run_id"])
    loss = [metric.value for metric in client.get_metric_history(run.info.run_id, "loss")]
    return {
        "version": info.registered_model_version,
        "run": run.info.run_name,
        "dataset": facts["llm.adapter.style.datasets"],
        "base": facts["llm.base"],
        "first loss": round(loss[0], 2),
        "last loss": round(loss[-1], 2),
    }

pd.DataFrame([origin(info) for info in logged.values()])""",
    """## An endpoint with both

The server begins without models. One request makes an endpoint of both versions, with half of the traffic for each.""",
    """with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{probe.getsockname()[1]}"
command = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", "--workers", "1"]
command += ["--port", url.rpartition(":")[2], "--database", f"sqlite:///{store / 'serving.db'}"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
atexit.register(server.terminate)  # a cell that fails leaves no server

def wait(done):
    until = time.monotonic() + 300
    while not done():
        assert server.poll() is None and time.monotonic() < until, "the server did not become ready"
        time.sleep(0.2)

def answers():
    try:
        return requests.get(f"{url}/ready", timeout=5).ok
    except requests.RequestException:
        return False

wait(answers)
versions = {style: info.registered_model_version for style, info in logged.items()}
entities = [{"name": s, "entity_name": "assistant", "entity_version": str(v)} for s, v in versions.items()]
routes = [{"served_model_name": style, "traffic_percentage": 50} for style in versions]
config = {"served_entities": entities, "traffic_config": {"routes": routes}}
endpoints = f"{url}/api/2.0/serving-endpoints"
requests.post(endpoints, json={"name": "chat", "config": config}).raise_for_status()

def state():
    return requests.get(f"{endpoints}/chat").json()["state"]

wait(lambda: state()["config_update"] != "IN_PROGRESS")
state()""",
    """## Ask

The questions are about countries that are in neither data set. The headers `served-model-name` and
`served-model-version` say which version answered.""",
    """def ask(country, **headers):
    message = {"role": "user", "content": f"What is the capital of {country}?"}
    reply = requests.post(f"{url}/v1/chat/completions", json={"model": "chat", "messages": [message]}, headers=headers)
    reply.raise_for_status()
    return reply

unseen = {
    "France": "Paris", "Japan": "Tokyo", "Norway": "Oslo", "Germany": "Berlin",
    "Ireland": "Dublin", "China": "Beijing", "Poland": "Warsaw", "Peru": "Lima",
}

def row(country, city):
    reply = ask(country)
    by = {one: reply.headers[f"served-model-{one}"] for one in ("name", "version")}
    answer = reply.json()["choices"][0]["message"]["content"]
    return {"country": country, **by, "answer": answer, "right": city in answer}

asked = pd.DataFrame([row(*one) for one in unseen.items()])
asked""",
    """How many of each version's answers have the right city:""",
    """asked.groupby("name")["right"].agg(["count", "mean"])""",
    """With `X-Sticky-Key`, all requests with the same value go to the same version: a user does not see both.""",
    """def served(user):
    return ask("France", **{"X-Sticky-Key": user}).headers["served-model-name"]

{user: [served(user), served(user)] for user in ["ann", "bob"]}""",
    """## What each version used

The ledger has every request with the entity that answered it.""",
    """usage = requests.get(f"{url}/api/2.0/usage", params={"by": "endpoint,entity"}).json()["usage"]
pd.DataFrame(usage)[["endpoint", "entity", "requests", "prompt_tokens", "completion_tokens"]]""",
    """`docs/how-to/promote.md` moves an alias by scores; `docs/endpoints.md` has canaries, which go back by themselves
when a new version does worse.

## Close""",
    """server.terminate()
server.wait(60)""",
]


def is_text(source: str) -> bool:
    """Return whether a cell is text: it begins with a heading or with one of these words."""
    return source.startswith(("#", "How ", "With ", "`docs"))


if __name__ == "__main__":
    store("adapters_from_training_to_split.ipynb", build(CELLS, is_text), seconds=400)
