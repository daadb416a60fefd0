"""A copy of a large model that has its first layers alone, small enough to be tried where the model is logged."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....serving.engine.models.sentence_files import transformer_dir
from .meta_model import count

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin")
MAX_TOKENS = 1024  # more than the engine's comparison uses


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The part of a model that was written: its first ``layers``, with the first ``tokens`` or, if None, with all."""

    layers: int
    tokens: int | None


def write_first_layers(
    auto_class: Any, model_dir: Path, target: Path, limit: int, **options: Any
) -> FirstLayers | None:
    """Write the first layers of the model in ``model_dir`` to ``target``, with the modules and files beside it.

    There are as many layers as show each kind of attention, and at least two. If they and the table of tokens have more
    than ``limit`` parameters, the table is cut to ``MAX_TOKENS``; if that is not enough, there is one layer. Return
    what was written; None if one layer is too large, or if the model has no number of layers. Raises
    transformers' errors.
    """
    from transformers import AutoConfig

    source = transformer_dir(model_dir)
    config = AutoConfig.from_pretrained(source, local_files_only=True, **options)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return None
    part = None
    for kept in dict.fromkeys((min(layers, _layers_kept(config)), 1)):
        _cut(config, kept)
        if (part := _part(auto_class, config, limit, **options)) is not None:
            break
    if part is None:
        return None
    if part.tokens is not None:
        _pad_within(config, part.tokens)
    dtype = "auto" if part.tokens is None else "bfloat16"  # the whole table is read once: half of it suffices
    with _unreported():
        model = auto_class.from_pretrained(source, config=config, dtype=dtype, local_files_only=True, **options)
    if part.tokens is not None:
        model.resize_token_embeddings(part.tokens, mean_resizing=False)
    folder = target / source.relative_to(model_dir)
    model.save_pretrained(folder)
    _link_others(source, folder)
    _link_others(model_dir, target)
    return part


def _part(auto_class: Any, config: Any, limit: int, **options: Any) -> FirstLayers | None:
    """Return what of a model with this configuration has at most ``limit`` parameters; None if its layers have more."""
    import torch

    with torch.device("meta"):
        # eager, as in ``meta_model.build``
        model = auto_class.from_config(copy.deepcopy(config), attn_implementation="eager", **options)
    parameters = count(model)
    if parameters <= limit:
        return FirstLayers(config.num_hidden_layers, None)
    rows, width = model.get_input_embeddings().weight.shape
    if rows <= MAX_TOKENS or parameters - (rows - MAX_TOKENS) * width > limit:
        return None
    return FirstLayers(config.num_hidden_layers, MAX_TOKENS)


def _pad_within(config: Any, tokens: int) -> None:
    """Give padding an id among the first ``tokens``, as a table refuses one beyond its end."""
    for one in (config, config.get_text_config()):
        if (getattr(one, "pad_token_id", None) or 0) >= tokens:
            one.pad_token_id = tokens - 1


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """Keep transformers from reporting the weights of the other layers as unexpected."""
    log = logging.getLogger("transformers.modeling_utils")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _layers_kept(config: Any) -> int:
    kinds = list(getattr(config, "layer_types", None) or ())
    return max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])


def _cut(config: Any, kept: int) -> None:
    """Set the number of layers, also in each list that has an entry for every layer."""
    layers = config.num_hidden_layers
    config.num_hidden_layers = kept
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(config, name, value[:kept])


def _link_others(source: Path, target: Path) -> None:
    """Link what ``target`` lacks of ``source``, other than its weights."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not file.name.endswith(WEIGHTS) and not (target / file.name).exists():
            (target / file.name).symlink_to(file.resolve())
