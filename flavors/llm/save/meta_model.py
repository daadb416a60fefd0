"""Models on torch's meta device: the names and shapes of their modules, without memory for weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....serving.interface.bundle import EmbeddingSpec
from ....serving.interface.errors import PackagingError, reason
from ....serving.interface.request import POOLED, Task
from ....serving.interface.settings import EngineSettings
from ..model.tasks import config_file, is_causal, read_config, reads_images

logger = logging.getLogger(__name__)


def build(model_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """Build the architecture in ``model_dir`` on the meta device, bounded by the size of its weights.

    Of a vision-language model this is the whole model; ``decoder_of`` has what the engine runs.

    Raises ``PackagingError`` if transformers lacks the architecture or cannot build it from this configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    from ....serving.engine.weights.config_bounds import in_proportion

    folder = config_file(model_dir).parent
    raw = read_config(model_dir)
    auto: Any = AutoModelForCausalLM if is_causal(raw) else AutoModel
    auto = AutoModelForImageTextToText if reads_images(raw) else auto
    try:
        with in_proportion(folder):
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            with torch.device("meta"):
                # eager: a configuration may name an attention whose code would be fetched from the hub
                return auto.from_config(config, trust_remote_code=trust_remote_code, attn_implementation="eager")
    except PackagingError as error:
        raise PackagingError(f"model: {error}") from None
    except Exception as error:  # from transformers, or from the model's own code
        raise PackagingError(f"model: its architecture cannot be built: {reason(error)}") from None


def decoder_of(whole: Any, model_dir: Path) -> Any:
    """Return the decoder of the vision-language model that was built from ``model_dir``; any other model is its own.

    Raises ``PackagingError``.
    """
    from ....serving.engine.models.image_encoder import decoder_of

    return decoder_of(whole) if reads_images(read_config(model_dir)) else whole


def check_supported(skeleton: Any, *, causal: bool) -> None:
    """Raise ``PackagingError`` for a model that the engine would run incorrectly."""
    from ....serving.engine.models import attention_probe, embedder, loader

    if causal:
        loader.refuse_unsupported(skeleton, skeleton.config.get_text_config())
        attention_probe.refuse_attention(skeleton)
        return
    try:
        embedder.refuse_unsupported(skeleton)
    except PackagingError as error:
        raise PackagingError(f"model: {error}") from None


def check_settings(
    skeleton: Any, settings: EngineSettings, tasks: Sequence[Task], spec: EmbeddingSpec, stored: str | None
) -> int:
    """Return how many tokens a sequence may have.

    Raises ``PackagingError``, worded as by the engine, for settings with which the model can run on no machine.
    ``spec`` says how long input texts may be. ``stored`` is how the weights are stored; None: as floats.
    """
    from ....serving.engine.models.embedder import resolve_max_length
    from ....serving.engine.models.loader import resolve_max_model_len
    from ....serving.engine.models.settings_check import refuse_settings

    refuse_settings(settings, tasks, stored)
    if POOLED.intersection(tasks):
        return resolve_max_length(skeleton, spec, settings)
    return resolve_max_model_len(skeleton.config.get_text_config(), settings)


def count(skeleton: Any) -> int:
    """Return the number of parameters; weights that are tied count once."""
    return sum(parameter.numel() for parameter in skeleton.parameters())


def check_weights(skeleton: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ``PackagingError`` if a stored tensor has the name of a parameter but a different shape."""
    for name, parameter in skeleton.named_parameters():
        stored = shapes.get(name)
        if stored is not None and stored != tuple(parameter.shape):
            raise PackagingError(
                f"model: {name} has shape {stored} in the weights but config.json gives {tuple(parameter.shape)}"
            )


def check_complete(model_dir: Path, tasks: tuple[Task, ...], *, trust_remote_code: bool = False) -> None:
    """Raise ``PackagingError`` if the weights lack tensors of the model that an engine would load.

    The weights are loaded as the engine loads them, but onto the meta device, which finds every tensor and reads none.
    Any other failure is ignored: the engine's machine may have what this one lacks.
    """
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    from ....serving.engine.models.loader import refuse_incomplete
    from ....serving.engine.weights.config_bounds import in_proportion

    folder = config_file(model_dir).parent
    auto: Any = AutoModelForImageTextToText if reads_images(read_config(model_dir)) else AutoModelForCausalLM
    if "score" in tasks:
        auto = AutoModelForSequenceClassification
    elif "embeddings" in tasks:
        auto = AutoModel
    try:
        with in_proportion(folder):
            model, found = auto.from_pretrained(
                str(folder),
                device_map={"": "meta"},
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # from transformers, safetensors, a quantisation package or the model's own code
        logger.debug("the weights were not checked: %s", reason(error))
        return
    try:
        refuse_incomplete(auto, model, found["missing_keys"], own_code=trust_remote_code)
    except PackagingError as error:
        raise PackagingError(f"model: {error}") from None


def linear_shapes(skeleton: Any) -> tuple[dict[str, tuple[int, int]], str | None]:
    """Return the shapes ``(out, in)`` of linears by module name, and the name of the output head (None: there is none).

    GPT-2's ``Conv1D`` stores ``[in, out]``.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = skeleton.get_output_embeddings() if hasattr(skeleton, "get_output_embeddings") else None
    shapes: dict[str, tuple[int, int]] = {}
    head_name = None
    for name, module in skeleton.named_modules():
        if type(module) in (nn.Linear, Conv1D):
            rows, columns = module.weight.shape
            shapes[name] = (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
            head_name = name if module is head else head_name
    return shapes, head_name
