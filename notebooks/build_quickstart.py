"""Writes ``quickstart.ipynb`` from the cells below and runs it: ``python notebooks/build_quickstart.py``.

The notebook is stored with its outputs, so that it reads well where nobody runs it; a cell that would print a path
of this machine does not belong in it.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).resolve().parent

CELLS = [
    """# Quickstart

Log a language model with two LoRA adapters to MLflow, then ask it: whole answers, streams, a table of prompts, and
embeddings with a plot. Fetch the weights and train the adapters first (two minutes, once):

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
store = Path(tempfile.mkdtemp())
mlflow.set_tracking_uri(f"sqlite:///{store}/mlflow.db")
experiment = mlflow.create_experiment("quickstart", artifact_location=str(store / "models"))
_ = mlflow.set_experiment(experiment_id=experiment)""",
    """## Log

The model's directory, its tokenizer and chat template, and both adapters become one MLflow model. Nothing is loaded
into memory: files are taken as they are, and checked.""",
    """assistant = llm.log_model(
    model=models / "smollm2",
    name="assistant",
    adapters={name: models / "adapters" / name for name in ("pirate", "json")},
    registered_model_name="assistant",
)
assistant.registered_model_version""",
    """## Predict

The engine starts with the first request, in a process of its own that others share and that ends with its last user.""",
    """model = mlflow.pyfunc.load_model("models:/assistant/1")
question = [{"role": "user", "content": "What is the capital of France?"}]
model.predict({"messages": question, "temperature": 0, "max_tokens": 48})""",
    """## Stream""",
    """for chunk in model.predict_stream({"messages": question, "adapter": "pirate", "temperature": 0}):
    print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)
chunk["usage"]""",
    """## Adapters

For people there is a plain object. Base and adapters run in the same batch.""",
    """assistant = llm.load_model("models:/assistant/1")
for adapter in (None, *assistant.adapters):
    answer = assistant.chat("What is the capital of Japan?", adapter=adapter, temperature=0, max_tokens=48)
    print(f"{adapter or 'base':>6}: {answer}   ({answer.usage.total_tokens} tokens, {answer.finish_reason})")""",
    """## A table of prompts

One row a request; all rows run in one batch, with a progress bar for many. `params` are fields for the rows that do
not have them.""",
    """countries = ["Italy", "Norway", "Peru", "Kenya", "Poland", "Cuba", "India", "Chile", "Turkey", "Canada"]
table = pd.DataFrame({"messages": [[{"role": "user", "content": f"What is the capital of {c}?"}] for c in countries]})
replies = model.predict(table, params={"adapter": "json", "temperature": 0, "max_tokens": 32})
answers = [reply["choices"][0]["message"]["content"] for reply in replies]
pd.DataFrame({"country": countries, "answer": answers, "tokens": [r["usage"]["total_tokens"] for r in replies]})""",
    """## Embeddings

A sentence-transformers directory is logged the same way; pooling and normalisation come with it.""",
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
    """Close what is open; the engines end by themselves.""",
    """assistant.close()""",
]


def build() -> nbformat.NotebookNode:
    cells = []
    for number, source in enumerate(CELLS):
        is_code = source.lstrip().startswith(("import", "assistant", "model", "for", "countries", "llm"))
        cell = new_code_cell(source) if is_code else new_markdown_cell(source)
        cell["id"] = f"cell-{number}"  # random ids would change the file at each build
        cells.append(cell)
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return new_notebook(cells=cells, metadata=metadata)


def without_noise(notebook: nbformat.NotebookNode) -> None:
    """Leave out what differs at each run and says nothing: progress bars, warnings and times."""
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)
        if "outputs" in cell:
            kept = [o for o in cell.outputs if o.get("name") != "stderr" and "widget" not in str(o.get("data"))]
            cell.outputs = joined(kept)
    notebook.metadata.pop("widgets", None)


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Neighbouring pieces of printed text as one output; a stream prints token by token."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream" and output.name == found[-1].name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def main() -> None:
    notebook = build()
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(HERE)}}).execute()
    without_noise(notebook)
    text = nbformat.writes(notebook)
    for private in {str(HERE.parents[0]), os.path.expanduser("~"), "/tmp/"}:
        if private in text:
            raise SystemExit(f"an output names a path of this machine: {private}")
    (HERE / "quickstart.ipynb").write_text(text + "\n")


if __name__ == "__main__":
    main()
