"""Vision-language models, taken apart: a decoder, which the engine runs as it does any other, and what reads images.

Such a model puts the vectors of an image where its prompt has the image's tokens, and is a causal language model
from there on::

    prompt    <s> What is  V  V+1  V+2 …  ?        ids from V on are tokens of images (``virtual_tokens``)
    vectors    w   w   w   p   p    p     w        w: the decoder's embedding, p: the image's features

A model that treats tokens of images in any other way (positions of two dimensions, attention in both directions,
features that enter later layers) would compute something else with the same vectors. ``check_decoder`` finds that out
at each load, by the logits of the whole model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from ...interface.bundle import Bundle, ImageSpec
from ...interface.errors import PackagingError, reason
from ...interface.request import RequestImage
from ...interface.settings import EngineSettings
from ...model_files.image_layout import expanded
from ..weights import linear
from ..weights.forward_context import ContextHolder
from .image_processor import inputs_of, load_processor

logger = logging.getLogger(__name__)

Vectors = npt.NDArray[np.float32]
Piece = dict[str, Any]  # arguments of the model's get_image_features
PROBE_SIZE = (160, 10)  # width and height: a model that cuts images into tiles cuts few from a long one
PROBE_TOKENS = 8  # tokens before and after the image
DECODERS = ("language_model", "text_model")  # what transformers' models call theirs
TOLERANCE = 1e-3  # of the largest logit: both are computed by the same code from the same vectors


def decoder_of(model: Any) -> Any:
    """Return the decoder of a vision-language model as a causal language model, which has the same weights.

    Raises ``PackagingError`` for a model whose parts are not those that transformers' models have."""
    name, inner = type(model).__name__, getattr(model, "model", None)
    language = next((found for part in DECODERS if (found := getattr(inner, part, None)) is not None), None)
    if language is None or not hasattr(inner, "get_image_features"):
        raise PackagingError(f"model: {name} is not supported: it has no language model with features of images")
    config = model.config.get_text_config()
    try:
        with torch.device("meta"):
            decoder = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # transformers has no such class, or it cannot be built from this configuration
        raise PackagingError(
            f"model: {name} is not supported: its decoder stands alone in no class: {reason(error)}"
        ) from None
    prefix = decoder.base_model_prefix
    if type(getattr(decoder, prefix, None)) is not type(language):
        raise PackagingError(f"model: {name} is not supported: its decoder is a {type(language).__name__}")
    setattr(decoder, prefix, language)
    decoder.set_output_embeddings(model.get_output_embeddings())
    return decoder.eval()


class ImageEncoder:
    """The encoder of images: their features, by the model's own code and processor."""

    def __init__(self, model: Any, bundle: Bundle) -> None:
        assert bundle.images is not None
        self.spec: ImageSpec = bundle.images
        self._inner = model.model
        _use_fast_attention(model)
        self._processor = load_processor(bundle.model_dir, bundle.tokenizer_dir)
        self._placeholder = self._processor.tokenizer.convert_ids_to_tokens(self.spec.placeholder_id)
        self._like = next(self._inner.parameters())
        self._taken = frozenset(inspect.signature(self._inner.get_image_features).parameters)

    def give_up_decoder(self) -> None:
        """Forget the decoder, whose weights are the engine's now."""
        for part in DECODERS:
            if getattr(self._inner, part, None) is not None:
                setattr(self._inner, part, torch.nn.Module())

    def to(self, device: Any, kernels: Literal["auto", "torch"]) -> ImageEncoder:
        """Move it to ``device``. On CPUs it computes in float32, its linears by our kernels if the setting ``kernels``
        says so: what reads images keeps its precision whatever the decoder's is."""
        self._inner.requires_grad_(False).to(device=device, dtype=torch.float32 if device.type == "cpu" else None)
        self._like = next(self._inner.parameters()).detach()[:0]
        if device.type == "cpu":
            linear.install(self._inner, ContextHolder(), EngineSettings(kernels=kernels))
        return self

    def pieces(self, image: RequestImage) -> list[Piece]:
        """Return what ``read`` takes, in order: the tiles of an image one by one, so that no step waits for all of
        them, or the whole image. Raises ``RuntimeError`` if the processor finds another number of tokens."""
        return self.cut(self.inputs(image), image.num_tokens)

    def inputs(self, image: RequestImage) -> Any:
        """Return what the processor makes of a prompt that is one image."""
        from PIL import Image

        pixels = Image.frombytes("RGB", (image.width, image.height), image.data)
        return inputs_of(self._processor, self._placeholder, [pixels])

    def cut(self, found: Any, num_tokens: int) -> list[Piece]:
        """Return the ``pieces`` of the processor's ``inputs``."""
        count = found["input_ids"][0].tolist().count(self.spec.image_id)
        if count != num_tokens:
            raise RuntimeError(f"the processor gives an image {count} tokens, its prompt {num_tokens}")
        whole = {name: value for name, value in found.items() if name in self._taken}
        if self.spec.layout == "fixed":
            return [whole]
        return [
            {name: value[:, i : i + 1] for name, value in whole.items()} for i in range(whole["pixel_values"].shape[1])
        ]

    @torch.inference_mode()
    def read(self, piece: Piece) -> Vectors:
        """Return the features of a piece, [tokens, hidden]."""
        given = {name: _moved(value, self._like) for name, value in piece.items()}
        found = self._inner.get_image_features(**given, return_dict=True).pooler_output
        parts = list(found) if isinstance(found, list | tuple) else [found]
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        return np.ascontiguousarray(rows.float().cpu().numpy())


@torch.inference_mode()
def check_decoder(model: Any, decoder: Any, reader: ImageEncoder) -> None:
    """Raise ``PackagingError`` unless ``decoder``, given the features of an image, has the logits of ``model``."""
    width, height = PROBE_SIZE
    draw = np.random.default_rng(0)
    spec, data = reader.spec, draw.integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()
    text = draw.integers(0, max(min(decoder.config.vocab_size, spec.placeholder_id), 1), 2 * PROBE_TOKENS).tolist()
    ids = (*text[:PROBE_TOKENS], spec.placeholder_id, *text[PROBE_TOKENS:])
    try:
        whole, (count,) = expanded(ids, [(width, height)], spec, spec.image_id, numbered=False)
        image = RequestImage(width=width, height=height, data=data, num_tokens=count)
        inputs = reader.inputs(image)
        wanted = _logits_of_model(model, inputs, whole)
        features = np.concatenate([reader.read(piece) for piece in reader.cut(inputs, count)])
        if len(features) != count:
            raise RuntimeError(f"an image has {count} tokens and {len(features)} vectors")
        embedded = decoder.get_input_embeddings()(torch.tensor(whole, device=wanted.device))
        places = torch.tensor([i for i, token_id in enumerate(whole) if token_id == spec.image_id])
        embedded[places] = torch.from_numpy(features).to(embedded)
        found = decoder(inputs_embeds=embedded[None]).logits[0]
    except Exception as error:  # of the model's code, for which nothing else is promised
        raise PackagingError(f"{type(model).__name__}: its images cannot be read: {reason(error)}") from error
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    if not difference <= TOLERANCE:
        raise PackagingError(
            f"{type(model).__name__} is not supported: it does not compute tokens of images like others"
            f" (logits differ by {difference:.2g})"
        )


def _logits_of_model(model: Any, inputs: Any, ids: Sequence[int]) -> Any:
    """Return logits [tokens, V] of the whole model given all of the processor's tensors."""
    like = next(model.parameters())
    names = frozenset(inspect.signature(model.forward).parameters) | {"pixel_values", "pixel_attention_mask"}
    tensors = {
        name: _moved(value, like)
        for name, value in inputs.items()
        if name in names and name not in ("input_ids", "attention_mask")
    }
    return model(input_ids=torch.tensor([list(ids)], device=like.device), **tensors).logits[0]


def _moved(value: Any, like: Any) -> Any:
    if not torch.is_tensor(value):
        return value
    return value.to(device=like.device, dtype=like.dtype if value.is_floating_point() else None)


def _use_fast_attention(model: Any) -> None:
    """Let the part that reads images attend as it does by default: the model was loaded with eager attention."""
    for name in getattr(model.config, "sub_configs", None) or ():
        if name != "text_config":
            try:
                model.set_attn_implementation({name: "sdpa"})
            except (ValueError, ImportError) as error:  # it has none
                logger.debug("%s keeps eager attention: %s", name, error)
