"""A copy of a large model that has its first layers alone, small enough to be tried where the model is logged."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....serving.engine.models.sentence_files import transformer_dir

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin")


def write_first_layers(auto_class: Any, model_dir: Path, target: Path, limit: int, **options: Any) -> int | None:
    """Write the first layers of the model in ``model_dir`` to ``target``, with the modules and files beside it.

    There are as many layers as show each kind of attention, and at least two. Return their number; None if the copy
    would have more than ``limit`` parameters, or if the model has no number of layers. Raises transformers' errors.
    """
    import torch
    from transformers import AutoConfig

    source = transformer_dir(model_dir)
    config = AutoConfig.from_pretrained(source, local_files_only=True, **options)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= (kept := _layers_kept(config)):
        return None
    _cut(config, layers, kept)
    with torch.device("meta"):
        whole = auto_class.from_config(copy.deepcopy(config), **options)
    if sum(parameter.numel() for parameter in whole.parameters()) > limit:
        return None
    with _unreported():
        model = auto_class.from_pretrained(source, config=config, dtype="auto", local_files_only=True, **options)
    folder = target / source.relative_to(model_dir)
    model.save_pretrained(folder)
    _link_others(source, folder)
    _link_others(model_dir, target)
    return kept


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


def _cut(config: Any, layers: int, kept: int) -> None:
    """Set the number of layers, also in each list that has an entry for every layer."""
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
