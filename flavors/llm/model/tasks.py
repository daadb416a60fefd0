"""Determine the tasks of a model (chat, completions, embeddings, score) from its files."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any, get_args

import msgspec

from ....serving.interface.bundle import CrossEncoderSpec, EmbeddingSpec
from ....serving.interface.errors import PackagingError, shown
from ....serving.interface.request import POOLED, Task
from ....serving.tasks.prompt.pair_template import pair_template
from .cross_encoders import check_score, has_head, is_cross_encoder, num_labels, read_cross_encoder
from .templates import DEFAULT

logger = logging.getLogger(__name__)

MLFLOW_PREFIX = "llm/v1/"
PRETRAINING = re.compile(r"For(MaskedLM|PreTraining)$")  # heads of encoders that play no part in embedding a text
HEAD = re.compile(r"For(?!MaskedLM$|PreTraining$)[A-Z]\w*$")  # every other head
ALL_TASKS: tuple[Task, ...] = get_args(Task)


def resolve_tasks(
    asked: Any, model_dir: Path, templates: dict[str, str], *, of_adapters: bool = False
) -> tuple[Task, ...]:
    """Return the tasks ``asked`` for (by name, or MLflow's ``llm/v1/chat``), else all that the model can answer.

    A causal language model answers completions, and chat if it or an adapter (``of_adapters``) has a template. A
    cross-encoder answers score; a sentence-transformers directory or an encoder answers embeddings. Raises
    ``PackagingError`` for a task that the model cannot answer, or if none is asked for and the model's head answers
    none.
    """
    config = read_config(model_dir)
    generates = not is_sentence_transformer(model_dir) and is_causal(config)
    if asked is None:
        if not generates:
            return _pooled_task(model_dir, config)
        return ("chat", "completions") if DEFAULT in templates or of_adapters else ("completions",)
    tasks = parse_tasks(asked)
    if "score" in tasks:
        check_score(model_dir, config)
    for task in tasks:
        if task not in POOLED and not generates:
            raise PackagingError(f"task: {task!r} needs a causal language model; this model can answer embeddings")
    if "chat" in tasks and DEFAULT not in templates and not of_adapters:
        raise PackagingError("task: 'chat' needs a chat template and the tokenizer has none; pass chat_template=")
    return tasks


def _pooled_task(model_dir: Path, config: dict[str, Any]) -> tuple[Task, ...]:
    """Return the task of a model that does not generate. Raises ``PackagingError`` if its head answers no task: the
    encoder without the head is logged only on request."""
    if is_cross_encoder(model_dir, config):
        return ("score",)
    if is_sentence_transformer(model_dir):  # its modules say that it embeds
        return ("embeddings",)
    names = [str(name) for name in config.get("architectures") or ()]
    if headed := [name for name in names if HEAD.search(name)]:
        labels = f" of {num_labels(config)} labels" if has_head(config) else ""
        raise PackagingError(
            f"task: {headed[0]} has a head{labels} that no task uses; task='embeddings' logs its encoder without it"
        )
    if pretrained := [name for name in names if PRETRAINING.search(name)]:
        logger.warning(
            "%s is logged as an embedding model, by the mean of its token vectors; its head is not used"
            " (task='embeddings' says so without this warning)",
            pretrained[0],
        )
    return ("embeddings",)


def parse_tasks(asked: Any) -> tuple[Task, ...]:
    """Parse the name of one task, or the names of several. Raises ``PackagingError``."""
    names = [asked] if isinstance(asked, str) else asked
    if not isinstance(names, list | tuple) or not names:
        raise PackagingError(f"task: {shown(asked)} is not allowed; expected one or several of {', '.join(ALL_TASKS)}")
    plain: list[Any] = [name.removeprefix(MLFLOW_PREFIX) if isinstance(name, str) else name for name in names]
    for name in plain:
        if name not in ALL_TASKS:
            raise PackagingError(f"task: {shown(name)} is not allowed; expected one of {', '.join(ALL_TASKS)}")
    tasks: tuple[Task, ...] = tuple(dict.fromkeys(plain))
    for task in POOLED.intersection(tasks):
        if len(tasks) > 1:
            raise PackagingError(
                f"task: {', '.join(tasks)} is not allowed; expected {task} alone or none: log the model once for each"
            )
    return tasks


def embedding_spec(tasks: tuple[Task, ...], model_dir: Path, tokenizer_dir: Path, given: Any) -> EmbeddingSpec | None:
    """Return how token vectors are pooled into one; None for a model without embeddings.

    This is ``given`` (a spec, or fields that override the spec found) or the spec that sentence-transformers would make
    of the model's files. Modules after pooling are always those of the files. Raises ``PackagingError``.
    """
    if "embeddings" not in tasks:
        if given is not None:
            raise PackagingError(
                f"embedding: {shown(given)} is not allowed; expected None: the model answers {', '.join(tasks)}"
            )
        return None
    found = _found_spec(model_dir, tokenizer_dir)  # first: a module that cannot run is refused whatever is given
    if isinstance(given, EmbeddingSpec):
        return msgspec.structs.replace(given, head=found.head)
    if given is None:
        return found
    try:
        if "head" in given:
            raise TypeError("head is always that of the model's files")
        return msgspec.convert(msgspec.to_builtins(found) | given, EmbeddingSpec)
    except (msgspec.ValidationError, TypeError) as error:
        raise PackagingError(f"embedding: {shown(given)} is not allowed: {error}") from None


def cross_encoder_spec(
    tasks: tuple[Task, ...], model_dir: Path, tokenizer_dir: Path, tokenizer: Any
) -> CrossEncoderSpec | None:
    """Return how a cross-encoder's output becomes a score; None for a model without scores.

    Raises ``PackagingError``, also for a tokenizer that cannot build a pair, or truncates it other than at the ends of
    its texts.
    """
    if "score" not in tasks:
        return None
    pair_template(tokenizer)
    if tokenizer.truncation_side != "right":
        raise PackagingError(
            f"tokenizer: truncation_side: {shown(tokenizer.truncation_side)} is not supported for a cross-encoder;"
            " expected 'right'"
        )
    return read_cross_encoder(model_dir, tokenizer_dir, read_config(model_dir))


def is_sentence_transformer(model_dir: Path) -> bool:
    """Return whether this is a sentence-transformers directory with modules of its own."""
    return (model_dir / "modules.json").is_file()


def is_causal(config: dict[str, Any]) -> bool:
    """Return whether the architecture is a causal language model. Raises ``PackagingError`` for an encoder-decoder."""
    if config.get("is_encoder_decoder"):
        raise PackagingError(
            f"model: {config.get('model_type')!r} is an encoder-decoder; decoder and encoder models can be served"
        )
    names = config.get("architectures") or _default_architecture(config.get("model_type"))
    return reads_images(config) or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def reads_images(config: dict[str, Any]) -> bool:
    """Return whether the architecture is a vision-language model, whose decoder generates text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    known: set[str] = set()
    for names in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        known.update((names,) if isinstance(names, str) else names)
    named = config.get("architectures")
    return "vision_config" in config and isinstance(named, list) and any(name in known for name in map(str, named))


def config_file(model_dir: Path) -> Path:
    """Find the model's config.json, which may be one folder down in a sentence-transformers directory.

    Raises ``PackagingError`` if there is none.
    """
    candidates = [model_dir / "config.json", *sorted(model_dir.glob("0_*/config.json"))]
    if (found := next((c for c in candidates if c.is_file()), None)) is None:
        raise PackagingError("model: it holds no config.json")
    return found


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return the parsed config.json; empty if it is not an object. Raises ``PackagingError``."""
    try:
        config = json.loads(config_file(model_dir).read_text())
    except (OSError, ValueError, RecursionError):
        raise PackagingError("model: config.json is not valid JSON") from None
    return config if isinstance(config, dict) else {}


def _default_architecture(model_type: Any) -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [name] if isinstance(name, str) else []


def _found_spec(model_dir: Path, tokenizer_dir: Path) -> EmbeddingSpec:
    """Return what sentence-transformers would do: for a model without its files, the mean of the token vectors (for a
    causal language model the last one) as it is."""
    from ....serving.engine.models.sentence_files import max_length_of, read_spec

    if is_sentence_transformer(model_dir):
        return read_spec(model_dir, tokenizer_dir) or EmbeddingSpec()
    config = read_config(model_dir)
    names = config.get("architectures") or [""]
    causal = str(names[0]).endswith("ForCausalLM") and config.get("is_causal") is not False
    found = EmbeddingSpec(
        pooling="lasttoken" if causal else "mean", normalize=False, max_length=max_length_of(tokenizer_dir)
    )
    logger.info(
        "the model has no sentence-transformers files: its vectors are the %s of its token vectors, not scaled to"
        " length 1; embedding={'pooling': …, 'normalize': True} changes that",
        "last" if causal else "mean",
    )
    return found
