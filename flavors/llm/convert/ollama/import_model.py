"""``from_modelfile``: log the model that an Ollama Modelfile describes."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from mlflow.models.model import ModelInfo

from .....serving.interface.errors import PackagingError, shown
from ...errors import raises_mlflow
from ...model.hub import HUB_ID, fetch_snapshot
from ...model.templates import DEFAULT, collect
from ...save.gguf.file import place_gguf
from ...save.save_model import log_model
from ...save.tokenizers import load_tokenizer
from ..prompt_template import tokens_before
from ..transformers_parts import linked
from . import parameters
from .chat_template import converted, with_messages
from .go_template import Unconverted
from .modelfile import Instruction, read

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"
OWN = "model"  # as chat_template: the one that came with the model
UNUSED = {
    "requires": "it is a version of Ollama",
    "renderer": "the chat template writes the prompt",
    "parser": "the format of tool calls and reasoning follows from the chat template",
    "draft": "log the draft model by itself, and name it with draft_model=",
    "capability": "the tasks follow from the model's files",
}


@raises_mlflow
def from_modelfile(
    path: str | os.PathLike[str],
    name: str | None = None,
    model: Any = None,
    chat_template: Any = None,
    **arguments: Any,
) -> ModelInfo:
    """Log the model that the Ollama Modelfile at ``path`` describes.

    Args:
        path: the Modelfile. Paths in it are relative to its directory.
        name: the name of the logged model.
        model: a GGUF file, a Hugging Face directory or a hub id in place of what ``FROM`` names. Ollama's own library
            is not read.
        chat_template: a template in Jinja in place of ``TEMPLATE``; ``"model"`` is the one that came with the model.
        arguments: any other argument of ``log_model``.

    Returns:
        MLflow's description of the logged model.

    Raises:
        MlflowException: ``errors.PackagingError`` for a line that is none of a Modelfile, for a name in Ollama's
            library, and for a template that has no conversion; the message names the line. What has no effect here is
            named in a warning.
    """
    file = Path(path).expanduser()
    found = read(file)
    with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as folder:
        source, tokenizer = _placed(found, file.absolute().parent, model, Path(folder))
        given = parameters.sort([one for one in found if one.name == "parameter"])
        for line in [*given.notes, *_unused(found)]:
            logger.warning("%s", line)
        _write_licence(found, source)
        asked: dict[str, Any] = dict(given.settings)
        if given.defaults:
            asked["defaults"] = given.defaults | (arguments.get("defaults") or {})
        asked |= _adapters(found, file.absolute().parent)
        templates = _templates(found, tokenizer, chat_template)
        if templates is not None:
            asked["chat_template"] = templates
        own = {key: value for key, value in arguments.items() if key != "defaults" or "defaults" not in asked}
        return log_model(source, name=name, tokenizer=tokenizer, **(asked | own))


def _placed(found: list[Instruction], folder: Path, given: Any, scratch: Path) -> tuple[Path, Any]:
    """Return a directory of the caller's own with the model's files, and its tokenizer."""
    froms = [one for one in found if one.name == "from"]
    if len(froms) > 1:
        raise PackagingError(f"line {froms[1].line}: FROM is there twice; expected one model")
    source = folder / Path(froms[0].value).expanduser() if given is None else Path(given).expanduser()
    target = scratch / (re.sub(r"[^\w.-]", "-", source.stem if source.is_file() else source.name) or "model")
    if source.is_file():
        if not _is_gguf(source):
            raise PackagingError(f"line {froms[0].line}: FROM {shown(source.name)} is not a GGUF file")
        return target, place_gguf(source, target)
    if not source.is_dir() and given is not None and HUB_ID.fullmatch(str(given)):
        source = fetch_snapshot(str(given), None)
    if not source.is_dir():
        what = f"model: {shown(str(given))}" if given is not None else f"line {froms[0].line}: FROM {froms[0].value}"
        raise PackagingError(
            f"{what} is no file or directory here, and Ollama's library is not read; expected a GGUF file (`ollama show"
            " --modelfile NAME` prints where Ollama keeps it), a Hugging Face directory, or model= with one of them or"
            " a hub id"
        )
    if not (source / "config.json").is_file() and len(files := sorted(source.glob("*.gguf"))) == 1:
        return target, place_gguf(files[0], target)
    if not (source / "config.json").is_file():
        raise PackagingError(f"FROM: {shown(source.name)} holds neither a config.json nor one GGUF file")
    linked(source, target)
    return target, load_tokenizer(source)


def _is_gguf(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _templates(found: list[Instruction], tokenizer: Any, given: Any) -> dict[str, str] | None:
    """Return the chat templates; None for a model without one. Raises ``PackagingError``."""
    own = collect(None, tokenizer) if given in (None, OWN) else collect(given, tokenizer)
    last = next((one for one in reversed(found) if one.name == "template" and one.value.strip()), None)
    if last is not None and given is None:
        try:
            beside = {OWN: own[DEFAULT]} if DEFAULT in own else {}
            own = own | beside | {DEFAULT: converted(last.value, tokens_before(tokenizer, "TEMPLATE"))}
        except Unconverted as error:
            raise PackagingError(
                f"line {last.line}: TEMPLATE: {error}; expected chat_template= with one in Jinja"
                f"{', or ' + repr(OWN) + ' for the one that came with the model' if own else ''}"
            ) from None
    messages = [{"role": one.key, "content": one.value} for one in found if one.name == "message"]
    texts = [one.value for one in found if one.name == "system"][-1:]
    texts += [one["content"] for one in messages if one["role"] == "system"]
    examples = [one for one in messages if one["role"] != "system"]
    system = "\n\n".join(text for text in texts if text) or None
    if DEFAULT not in own:
        if system is not None or examples:
            raise PackagingError("SYSTEM and MESSAGE need a chat template, and the model has none; expected TEMPLATE")
        return None
    return own | {DEFAULT: with_messages(own[DEFAULT], system, examples)}


def _adapters(found: list[Instruction], folder: Path) -> dict[str, Any]:
    adapters: dict[str, Path] = {}
    for one in (one for one in found if one.name == "adapter"):
        source = folder / Path(one.value).expanduser()
        if source.is_file():
            raise PackagingError(
                f"line {one.line}: ADAPTER {shown(source.name)} is not allowed; expected a directory in peft's layout:"
                " adapters in GGUF or as a single file are not read"
            )
        if not source.is_dir():
            raise PackagingError(f"line {one.line}: ADAPTER {shown(one.value)} is no directory here")
        adapters[re.sub(r"[^\w-]", "-", source.resolve().name).strip("-") or "adapter"] = source
    return {"adapters": adapters, "default_adapter": next(reversed(adapters))} if adapters else {}


def _unused(found: list[Instruction]) -> list[str]:
    return [
        f"{one.name.upper()} {one.value} has no effect here: {UNUSED[one.name]}" for one in found if one.name in UNUSED
    ]


def _write_licence(found: list[Instruction], target: Path) -> None:
    texts = [one.value.strip() for one in found if one.name == "license" and one.value.strip()]
    if texts:
        (target / "LICENSE").unlink(missing_ok=True)
        (target / "LICENSE").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
