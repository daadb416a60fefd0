"""Pooling of token vectors into one vector: its description in a sentence-transformers directory, and the reduction.

::

    modules.json                        [{"type": "…Transformer", "path": ""}, {"type": "…Pooling", …}]
    <pooling path>/config.json          pooling_mode_mean_tokens … or pooling_mode
    sentence_bert_config.json           max_seq_length, beside the transformer
    config_sentence_transformers.json   prompts, default_prompt_name

Reading the description needs no torch; ``pool`` imports it when called.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...interface.bundle import EmbeddingSpec
from ...interface.errors import PackagingError

LEGACY_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODES = tuple(LEGACY_KEYS.values())


def read_spec(model_dir: str | Path) -> EmbeddingSpec | None:
    """Read how ``model_dir`` pools; None if it is no sentence-transformers directory.

    Raises ``PackagingError``, which names what is not supported.
    """
    root = Path(model_dir)
    if not (root / "modules.json").is_file():
        return None
    modules = [(str(entry["type"]).rsplit(".", 1)[-1], str(entry["path"])) for entry in _read(root / "modules.json")]
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise PackagingError(
            f"sentence-transformers modules {', '.join(kinds)} are not supported; expected Transformer, Pooling and, "
            "if wanted, Normalize"
        )
    limits = _read(root / modules[0][1] / "sentence_bert_config.json")
    if limits.get("do_lower_case") and not _tokenizer_lowercases(root, root / modules[0][1]):
        raise PackagingError(
            "sentence_bert_config.json: do_lower_case true is not supported; expected false, or a tokenizer.json whose "
            "normalizer lowercases"
        )
    texts = _read(root / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (texts.get("prompts") or {}).items()}
    pooling = _read(root / modules[1][1] / "config.json")
    if pooling.get("include_prompt") is False and any(prompts.values()):
        raise PackagingError("pooling with include_prompt=False is not supported; expected True")
    return EmbeddingSpec(
        pooling=_mode(pooling),
        normalize="Normalize" in kinds,
        max_length=limits.get("max_seq_length"),
        prompts=prompts,
        default_prompt=texts.get("default_prompt_name"),
    )


def transformer_dir(model_dir: str | Path) -> Path:
    """The folder of the transformer in ``model_dir``: a sub-directory in older sentence-transformers layouts."""
    root = Path(model_dir)
    if not (root / "modules.json").is_file():
        return root
    return root / next(
        (str(e["path"]) for e in _read(root / "modules.json") if str(e["type"]).endswith("Transformer")), ""
    )


def _tokenizer_lowercases(*folders: Path) -> bool:
    """Return whether the tokenizer lowercases itself, as ``do_lower_case`` asks; sentence-transformers would do it
    again."""
    normalizer = next((found["normalizer"] for folder in folders if (found := _read(folder / "tokenizer.json"))), None)
    steps = (normalizer or {}).get("normalizers") or [normalizer or {}]
    return any(
        step.get("type") == "Lowercase" or (step.get("type") == "BertNormalizer" and step.get("lowercase"))
        for step in steps
    )


def _mode(config: dict[str, Any]) -> str:
    given = config.get("pooling_mode") or [mode for key, mode in LEGACY_KEYS.items() if config.get(key)]
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in MODES:
        raise PackagingError(
            f"pooling {'+'.join(modes) or 'none'} is not supported; expected one of {', '.join(MODES)}"
        )
    return str(modes[0])


def _read(path: Path) -> Any:
    """The file's JSON; {} if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise PackagingError(f"{path.name} cannot be read: {error}") from None


def pool(hidden: Any, lengths: Sequence[int], mode: str) -> Any:
    """Pool ``hidden`` [T, D], sequences of ``lengths`` one after another -> float32 [len(lengths), D]."""
    import torch

    def sums(rows: Any) -> Any:  # one bag per sequence: adds in order like segment_reduce, and 20 times as fast
        every = torch.arange(len(rows), device=rows.device)
        return torch.nn.functional.embedding_bag(every, rows, ends - sizes, mode="sum")

    hidden = hidden.float()
    sizes = torch.tensor(list(lengths), device=hidden.device)
    ends = sizes.cumsum(0)
    if mode == "cls":
        return hidden[ends - sizes]
    if mode == "lasttoken":
        return hidden[ends - 1]
    if mode == "max":
        return torch.segment_reduce(hidden, "max", lengths=sizes)
    if mode == "weightedmean":
        weights = torch.cat([torch.arange(1, n + 1, device=hidden.device) for n in lengths])[:, None].float()
        return sums(hidden * weights) / (sizes * (sizes + 1) / 2)[:, None]
    return sums(hidden) / (sizes.float().sqrt() if mode == "mean_sqrt_len_tokens" else sizes)[:, None]
