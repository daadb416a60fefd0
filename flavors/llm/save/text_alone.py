"""The text of a model of several modalities as a model of its own: its decoder, without what reads images or sounds.

The checkpoint is loaded once, in the type in which it is stored, and its decoder is written as a causal language model.
The logits of the two are compared, so that the text is the one that the whole model would give.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, reason, shown
from ..model.tasks import read_config
from .quantised import check_directory

logger = logging.getLogger(__name__)

HINT = "; images=False logs its text alone"
# Decoders that stand alone in no class: for text, where their three positions are one, they compute what this one does.
SAME_FOR_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
OF_IMAGES = ("mrope_section", "mrope_interleaved")
DECODERS = ("language_model", "text_model")  # what transformers' models call theirs
PROBE_TOKENS = 24
TOLERANCE = {"torch.float32": 1e-4, "torch.float16": 2e-2, "torch.bfloat16": 5e-2}  # of the largest logit
NOT_OF_THE_CONFIG = ("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype")


def is_composite(config: dict[str, Any]) -> bool:
    """Return whether the model of this config.json has a text model and others beside it."""
    return any(isinstance(config.get(name), dict) for name in ("text_config", "thinker_config"))


def hint(model_dir: Path, config: dict[str, Any]) -> str:
    """Return what to add to a refusal of the model in ``model_dir``: how its text is logged, or why that is not
    possible; "" for a model of text alone."""
    if not is_composite(config):
        return ""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ....serving.engine.models.loader import refuse_unsupported
    from ....serving.engine.weights.config_bounds import in_proportion

    try:
        with in_proportion(model_dir), torch.device("meta"):
            text = _text_config(AutoConfig.from_pretrained(str(model_dir)))
            skeleton = AutoModelForCausalLM.from_config(text, attn_implementation="eager")
        refuse_unsupported(skeleton, skeleton.config)
    except PackagingError as error:
        return f"; nor can its text be logged alone: {error}"
    except Exception as error:  # of transformers: it has no such class
        logger.debug("no separate language model: %s", reason(error))
        return ""
    return HINT


def _text_config(config: Any) -> Any:
    """Return the configuration of the causal language model that computes the text of a model with this ``config``."""
    from transformers import AutoConfig

    text = config.get_text_config()
    kind = SAME_FOR_TEXT.get(text.model_type)
    return text if kind is None else AutoConfig.for_model(kind, **_plain(text.to_dict()))


def check_images(whole: Any) -> None:
    """Raise ``PackagingError`` if what is seen of the model shows that it treats tokens of images unlike others."""
    import inspect

    name, text = type(whole).__name__, whole.config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    why = None
    if any(kind.get("mrope_section") for kind in kinds):
        why = "tokens of images have positions of several dimensions (mrope_section)"
    taken = inspect.signature(getattr(whole, "model", whole).forward).parameters
    if types := [given for given in ("token_type_ids", "mm_token_type_ids") if given in taken]:
        why = why or f"tokens of images attend unlike those of text ({types[0]})"
    if why is not None:
        raise PackagingError(f"model: the images of {name} are not supported: {why}")


def place_text(whole_dir: Path, target: Path) -> None:
    """Write the decoder of the model in ``whole_dir`` to ``target``, as a causal language model.

    Raises ``PackagingError`` if it has none that can stand alone, or computes something else.
    """
    import torch

    config = read_config(whole_dir)
    if not is_composite(config):
        raise PackagingError("images: False is not allowed; expected None: the model is not one of several modalities")
    check_directory(whole_dir, even_known=True)
    whole = _load(whole_dir, config)
    decoder = _decoder(whole)
    with torch.inference_mode():
        _compare(whole, decoder)
    target.mkdir(parents=True, exist_ok=True)
    try:
        decoder.save_pretrained(target)
    except Exception as error:  # from transformers or safetensors
        raise PackagingError(f"model: its text cannot be saved: {reason(error)}") from None
    if (whole_dir / "generation_config.json").is_file():
        shutil.copyfile(whole_dir / "generation_config.json", target / "generation_config.json")
    logger.info("the text of %s is logged alone, as %s", type(whole).__name__, type(decoder).__name__)


def _load(folder: Path, config: dict[str, Any]) -> Any:
    import transformers

    from ....serving.engine.models.loader import refuse_incomplete
    from ....serving.engine.weights.config_bounds import in_proportion

    name = next(iter(config.get("architectures") or ()), None)
    found = getattr(transformers, str(name), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise PackagingError(f"model: transformers has no class {shown(name)}, which config.json names")
    try:
        with in_proportion(folder):
            whole: Any = found
            model, info = whole.from_pretrained(
                str(folder),
                dtype="auto",
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except PackagingError:
        raise
    except Exception as error:  # from transformers, safetensors, or the model's own code
        raise PackagingError(f"model: it cannot be loaded: {type(error).__name__}: {reason(error)}") from None
    refuse_incomplete(found, model, info["missing_keys"])
    return model.eval()


def _decoder(whole: Any) -> Any:
    """Return the decoder of ``whole`` as a causal language model with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from ....serving.engine.models.loader import refuse_unsupported

    name, text = type(whole).__name__, whole.config.get_text_config()
    inner = getattr(whole, "model", None)
    parts = (getattr(of, at, None) for at in DECODERS for of in (inner, whole))
    language = next((part for part in parts if part is not None), None)
    if language is None or text is whole.config:
        raise PackagingError(f"model: {name} has no language model that could be served alone")
    language = getattr(language, "model", language)  # where the language model has a head of its own
    text = _text_config(whole.config)
    try:
        with torch.device("meta"):
            decoder = AutoModelForCausalLM.from_config(text, attn_implementation="eager")
        refuse_unsupported(decoder, text)
    except PackagingError as error:
        raise PackagingError(f"model: {error}") from None
    except Exception as error:  # transformers has no such class, or cannot build it from this configuration
        raise PackagingError(f"model: the language model of {name} has no class of its own: {reason(error)}") from None
    prefix = decoder.base_model_prefix
    base = getattr(decoder, prefix)
    try:
        if type(base) is type(language):
            setattr(decoder, prefix, language)
            base = language
        else:
            base.load_state_dict(language.state_dict(), strict=True, assign=True)
            base.rotary_emb = type(base.rotary_emb)(text)  # its buffers are in no state
    except Exception as error:  # of torch: the modules of the two differ
        raise PackagingError(
            f"model: the language model of {name} is no {type(decoder).__name__}: {reason(error)}"
        ) from None
    try:
        head = whole.get_output_embeddings()
    except AttributeError:  # transformers looks for it in a part that some models do not have
        head = getattr(whole, "lm_head", None)
    if head is not None:
        decoder.set_output_embeddings(head)
    if left := [at for at, tensor in (*decoder.named_parameters(), *decoder.named_buffers()) if tensor.is_meta]:
        raise PackagingError(f"model: the language model of {name} has no {left[0]}, which stands alone in it")
    decoder.config.architectures = [type(decoder).__name__]
    decoder.config.tie_word_embeddings = decoder.get_output_embeddings().weight is base.get_input_embeddings().weight
    return decoder.eval()


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without its type and what it says about positions of images."""
    kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_CONFIG}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(kept.get(key), dict):
            rope = {name: value for name, value in kept[key].items() if name not in OF_IMAGES}
            kept[key] = rope | ({"rope_type": "default"} if rope.get("rope_type") == "mrope" else {})
    return kept


def _compare(whole: Any, decoder: Any) -> None:
    """Raise ``PackagingError`` unless both have the same logits for a text."""
    import torch

    first = sorted({int(i) for i in torch.linspace(3, min(int(decoder.config.vocab_size), 5000) - 1, PROBE_TOKENS)})
    special = {
        value for key, value in vars(whole.config).items() if key.endswith(("_token_id", "_token_index", "_token"))
        if isinstance(value, int)
    }  # fmt: skip
    ids = torch.tensor([[i for i in first if i not in special]])
    try:
        own, found = whole(input_ids=ids).logits.float(), decoder(input_ids=ids).logits.float()
    except Exception as error:  # of the model's code, for which nothing else is promised
        raise PackagingError(f"model: the text of {type(whole).__name__} cannot be run: {reason(error)}") from None
    difference = float((own - found).abs().max() / own.abs().max())
    if not difference <= TOLERANCE.get(str(decoder.dtype), 1e-4):
        raise PackagingError(
            f"model: the language model of {type(whole).__name__} does not compute alone what it computes within it"
            f" (logits differ by {difference:.2g})"
        )
