"""Build ``quickstart.ipynb`` from the cells below and run it: ``python notebooks/build_quickstart.py``.

The notebook is stored with its outputs, so that it can be read without running it. No cell may print a path of this
machine.
"""

from __future__ import annotations

from notebook_building import build, store

CELLS = [
    """# Quickstart

Log a language model with two LoRA adapters to MLflow, then ask it for whole answers, streams and a table of
prompts. At the end, an embedding model compares sentences in a plot. Fetch the weights and train the adapters first
(two minutes, once):

```
python examples/quickstart/fetch_weights.py && python examples/quickstart/train_adapters.py
```""",
    """import logging
import os
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import mlflow
import pandas as pd

from mlflow_llm.flavors import llm

logging.getLogger("mlflow").setLevel(logging.ERROR)
logging.getLogger("alembic").setLevel(logging.ERROR)

models = Path(os.environ.get("MLFLOW_LLM_QUICKSTART_MODELS", "../.cache/models"))
folder = tempfile.TemporaryDirectory()  # goes with the kernel
store = Path(folder.name)
mlflow.set_tracking_uri(f"sqlite:///{store}/mlflow.db")
experiment = mlflow.create_experiment("quickstart", artifact_location=str(store / "models"))
_ = mlflow.set_experiment(experiment_id=experiment)""",
    """## Log

The model's directory, its tokenizer and chat template, and both adapters become one MLflow model. The weights are not
loaded into memory: the files are checked and stored as they are.""",
    """assistant = llm.log_model(
    model=models / "smollm2",
    name="assistant",
    adapters={name: models / "adapters" / name for name in ("pirate", "json")},
    registered_model_name="assistant",
)
assistant.registered_model_version""",
    """## Predict

The engine starts with the first request. It is a separate process, which other programs share and which exits after its
last user has gone.""",
    """model = mlflow.pyfunc.load_model("models:/assistant/1")
question = [{"role": "user", "content": "What is the capital of France?"}]
model.predict({"messages": question, "temperature": 0, "max_tokens": 48})""",
    """## Stream""",
    """for chunk in model.predict_stream({"messages": question, "adapter": "pirate", "temperature": 0}):
    print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)
chunk["usage"]""",
    """## Adapters

`llm.load_model` returns a plain object for interactive use. The base model and its adapters run in the same batch.""",
    """assistant = llm.load_model("models:/assistant/1")
for adapter in (None, *assistant.adapters):
    answer = assistant.chat("What is the capital of Japan?", adapter=adapter, temperature=0, max_tokens=48)
    print(f"{adapter or 'base':>6}: {answer}   ({answer.usage.total_tokens} tokens, {answer.finish_reason})")""",
    """## A table of prompts

Each row is a request. All rows run in one batch, with a progress bar if there are many. `params` are request fields for
all rows that do not set them.""",
    """countries = ["Italy", "Norway", "Peru", "Kenya", "Poland", "Cuba", "India", "Chile", "Turkey", "Canada"]
table = pd.DataFrame({"messages": [[{"role": "user", "content": f"What is the capital of {c}?"}] for c in countries]})
replies = model.predict(table, params={"adapter": "json", "temperature": 0, "max_tokens": 32})
answers = [reply["choices"][0]["message"]["content"] for reply in replies]
pd.DataFrame({"country": countries, "answer": answers, "tokens": [r["usage"]["total_tokens"] for r in replies]})""",
    """## Embeddings

A sentence-transformers directory is logged in the same way. Its pooling and normalisation are part of the model.""",
    """llm.log_model(model=models / "minilm", name="embedder", registered_model_name="embedder")
sentences = [
    "A cat sleeps on the sofa.",
    "A kitten naps on the couch.",
    "The dog chases a ball.",
    "Interest rates rose again.",
    "The central bank tightened its policy.",
]
with llm.load_model("models:/embedder/1") as embedder:
    vectors = embedder.embed(sentences)
vectors.shape, vectors.dtype""",
    """import matplotlib.pyplot as plt

similarity = vectors @ vectors.T
figure, axes = plt.subplots(figsize=(6, 4))
image = axes.imshow(similarity, cmap="viridis", vmin=0, vmax=1)
axes.set_xticks(range(len(sentences)), range(1, len(sentences) + 1))
axes.set_yticks(range(len(sentences)), [f"{i + 1}  {s}" for i, s in enumerate(sentences)])
for i, row in enumerate(similarity):
    for j, value in enumerate(row):
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black")
figure.colorbar(image, label="cosine similarity")
figure.tight_layout()
plt.show()""",
    """Close the object. Engines exit by themselves after their last user has gone.""",
    """assistant.close()""",
]


def is_text(source: str) -> bool:
    """Return whether a cell is text: those of code begin with one of these words."""
    return not source.lstrip().startswith(("import", "assistant", "model", "for", "countries", "llm"))


if __name__ == "__main__":
    store("quickstart.ipynb", build(CELLS, is_text), seconds=240)
