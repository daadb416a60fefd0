"""The processor of a vision-language model: transformers' own, with Pillow as its backend."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from ...interface.errors import PackagingError, reason

MAX_SIDE = 8192
SIZES = frozenset(
    (
        "shortest_edge",
        "longest_edge",
        "height",
        "width",
        "patch_size",
        "image_seq_len",
        "image_seq_length",
        "num_additional_image_tokens",
    )
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "image_processor_config.json")


def load_processor(model_dir: str | Path, tokenizer_dir: str | Path) -> Any:
    """Load the processor from the files in ``model_dir`` (or beside the tokenizer) and the tokenizer.

    Raises ``PackagingError`` if there is none, or it cannot be loaded."""
    from transformers import AutoProcessor

    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise PackagingError("images need Pillow: pip install 'mlflow-llm[images]'") from None
    if not any((Path(folder) / name).is_file() for folder in (model_dir, tokenizer_dir) for name in PROCESSOR_FILES):
        raise PackagingError("model: it reads images, but has no preprocessor_config.json or processor_config.json")
    with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as both, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _link(Path(model_dir), Path(both))
        _link(Path(tokenizer_dir), Path(both))
        _check_numbers(Path(both))
        given: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            try:
                found = AutoProcessor.from_pretrained(both, backend="pil", **given)
            except Exception:  # one that also cuts videos does that with torchvision alone
                found = AutoProcessor.from_pretrained(both, **given)
        except Exception as error:  # of transformers: a missing package, a file that is not JSON
            found = _without_video(Path(both))
            if found is None:
                raise PackagingError(f"model: its processor cannot be loaded: {reason(error)}") from None
    if not hasattr(found, "image_processor") or not hasattr(found, "tokenizer"):  # what is left of an unknown class
        raise PackagingError(f"model: its processor cannot be loaded: it is a {type(found).__name__}")
    return found


def _check_numbers(folder: Path) -> None:
    """Raise ``PackagingError`` for sizes with which a small image would take gigabytes, or hours."""
    for name in PROCESSOR_FILES:
        try:
            found = json.loads((folder / name).read_text())
        except (OSError, ValueError, RecursionError):
            continue  # transformers says what is wrong with it
        todo = [found]
        while todo:
            one = todo.pop()
            todo += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            for key, value in one.items() if isinstance(one, dict) else ():
                if key in SIZES and isinstance(value, int | float) and not 0 <= value <= MAX_SIDE:
                    raise PackagingError(f"model: {name}: {key} is {value}; expected 0 to {MAX_SIDE}")


def _without_video(folder: Path) -> Any | None:
    """Return a processor for a model whose own can also cut videos, for which torchvision is missing; None for others.

    Of images SmolVLM's makes what Idefics 3's makes."""
    from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor

    try:
        given = json.loads((folder / "processor_config.json").read_text())
        if given.get("processor_class") != "SmolVLMProcessor":
            return None
        images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return Idefics3Processor(images, words, image_seq_len=given["image_seq_len"])
    except Exception:  # the first error says more
        return None


def inputs_of(processor: Any, text: str, images: list[Any]) -> Any:
    """Return what the processor makes of a prompt with Pillow's ``images``: token ids and tensors, by name."""
    return processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)


def _link(source: Path, target: Path) -> None:
    for file in source.iterdir():
        if (
            file.is_file()
            and file.suffix in (".json", ".txt", ".model", ".jinja")
            and not (target / file.name).exists()
        ):
            (target / file.name).symlink_to(file.absolute())
