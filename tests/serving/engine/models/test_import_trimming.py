"""The imports of an engine's process."""

from __future__ import annotations

import subprocess
import sys

UNUSED = ("accelerate", "boto3", "scipy.optimize", "torch.distributed.tensor", "torch._dynamo.symbolic_convert")
CODE = f"""
import sys
from mlflow_llm.serving.engine.models.import_trimming import import_lean
import_lean()
import mlflow_llm.serving.engine.core
import transformers.models.llama.modeling_llama, transformers.models.mixtral.modeling_mixtral
print(*(name for name in {("sympy", *UNUSED)!r} if name in sys.modules))
import torch, transformers
cached = transformers.utils.import_utils.create_import_structure_from_path
models = transformers.models.__path__[0]
print(cached(models) == cached.args[0](models), transformers.LlamaForCausalLM.__module__)
with torch.device("meta"):
    torch.nn.Embedding(2, 2)
print(*(name for name in {UNUSED!r} if name in sys.modules))
doubled = torch.compile(lambda x: 2 * x, backend="eager")
print(doubled(torch.ones(2)).tolist(), torch._dynamo.disable.__module__, torch.compiler.disable.__module__)
"""


def test_an_engines_process_imports_what_it_uses_and_the_compiler_still_runs() -> None:
    """An engine imports no compiler, distributed tensors or scipy until a model needs them, and torch.compile still
    works. The models' exports come from the cache and equal those of the sources."""
    asked = subprocess.run([sys.executable, "-P", "-c", CODE], capture_output=True, text=True, check=True)
    assert asked.stdout.splitlines() == [
        "",
        "True transformers.models.llama.modeling_llama",
        "",
        "[2.0, 2.0] torch._dynamo.decorators torch.compiler",
    ]
