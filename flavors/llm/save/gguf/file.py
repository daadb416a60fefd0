"""Dequantise a GGUF file to float32 safetensors, with the config, tokenizer and end-of-text ids that it describes.

transformers reads the weights. The config is ours (``gguf_families``): transformers' reader skips keys without a word,
among them every scaling of rotary embeddings. Every key and every tensor is used, or the file is refused by its name.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from .....serving.interface.errors import PackagingError, reason
from ..pretrained import save_pretrained
from .families import model_config
from .header import Header, read_header
from .rope import ROPE_TENSORS
from .tokenizer import check_tokenizer, end_ids, read_tokenizer

# general.sampling.* by the name in a generation config
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
SAMPLING_OFF: dict[str, Any] = {"mirostat": 0, "xtc_probability": 0.0}
TENSORS_SHOWN = 3


def place_gguf(file: Path, target: Path) -> Any:
    """Write the model in ``file`` to the directory ``target`` and return its tokenizer. Raises ``PackagingError``."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise PackagingError("model: a GGUF file needs the package gguf: pip install 'mlflow-llm[gguf]'") from None
    header = read_header(file)
    _check_general(header)
    check_tokenizer(header)
    config = model_config(header)
    with tempfile.TemporaryDirectory() as folder:
        # transformers looks at the suffix, and only at a lower-case one
        link = Path(folder) / "model.gguf"
        os.symlink(file.resolve(), link)
        model = _read_model(header, config, link)
        tokenizer = read_tokenizer(header, link)
    model.config._name_or_path = ""
    generation = model.generation_config
    generation.eos_token_id = end_ids(header) or None
    generation.update(**_sampling(header))
    save_pretrained(model, target)
    return tokenizer


def _check_general(header: Header) -> None:
    for key, value in header.values.items():
        group, _, name = key.partition(".")
        if group in ("adapter", "clip", "xielu"):
            header.refuse_key(key, "the file of a language model")
        if key == "split.count" and value not in (0, 1):
            header.refuse_key(key, "one file: join its parts with llama.cpp's llama-gguf-split --merge")
        if key == "general.type" and value != "model":
            header.refuse_key(key, "'model'")
        if name.startswith("tensor_extra") and group == "general":
            header.refuse_key(key, "a file without this key")


def _sampling(header: Header) -> dict[str, Any]:
    """Return the sampling defaults that the file recommends. Raises ``PackagingError`` for one not supported."""
    found: dict[str, Any] = {}
    prefix = "general.sampling."
    for key in (key for key in header.values if key.startswith(prefix)):
        name = key.removeprefix(prefix)
        if name in SAMPLING:
            found[SAMPLING[name]] = header.values[key]
        elif name not in SAMPLING_OFF or header.values[key] != SAMPLING_OFF[name]:
            header.refuse_key(key, str(SAMPLING_OFF[name]) if name in SAMPLING_OFF else "a file without this key")
    return found | {"do_sample": True} if found else {}


def _read_model(header: Header, config: Any, link: Path) -> Any:
    """Read the weights. Raises ``PackagingError`` if a tensor of the file or of the model has no counterpart."""
    from transformers import AutoModelForCausalLM

    from .....serving.engine.models.loader import refuse_incomplete

    try:
        _check_tensors(header, config)
        model, found = AutoModelForCausalLM.from_pretrained(
            link.parent,
            config=config,
            gguf_file=link.name,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    except PackagingError:
        raise
    except Exception as error:  # from gguf's reader or transformers'
        raise PackagingError(f"model: {header.file} cannot be read: {reason(error)}") from None
    try:
        refuse_incomplete(AutoModelForCausalLM, model, found["missing_keys"])
    except PackagingError as error:
        raise PackagingError(f"model: {header.file}: {error}") from None
    # The weights are plain floats now; with its quantizer left in place, transformers would refuse to save the model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _check_tensors(header: Header, config: Any) -> None:
    """Refuse a file with tensors that transformers' reader would skip: those that the model has no place for."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    known = set(get_gguf_hf_weights_map(empty, processor)) | set(ROPE_TENSORS)
    unused = [name for name in header.tensors if name not in known and name.removesuffix(".weight") not in known]
    if unused:
        more = ", …" if len(unused) > TENSORS_SHOWN else ""
        raise PackagingError(
            f"model: {header.file} holds {len(unused)} tensors that {type(empty).__name__} has no place for:"
            f" {', '.join(unused[:TENSORS_SHOWN])}{more}"
        )
