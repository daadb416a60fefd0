"""Merge an adapter into the weights of its base, with the libraries that trained it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError, reason, shown
from ..model.tasks import config_file, read_config
from ..save.adapters import CONFIG


def merged_model(model_dir: Path, adapter: Path) -> Any:
    """Return the transformers model in ``model_dir`` with the peft ``adapter`` merged into its weights.

    The weights stay in the type in which they are stored. Raises ``PackagingError`` for an adapter that is no change of
    weights, and for a base that runs code of its own.
    """
    import peft
    import transformers

    kind = json.loads((adapter / CONFIG).read_bytes()).get("peft_type")
    method = getattr(peft.PeftType, str(kind), None)
    if method in (peft.PeftType.PROMPT_TUNING, peft.PeftType.PREFIX_TUNING, peft.PeftType.P_TUNING, None):
        raise PackagingError(
            f"merge: {shown(adapter.name)} is not allowed: {shown(kind)} is a learned prompt, not a change of weights;"
            " without merge= it is written beside the base"
        )
    config = read_config(model_dir)
    if "auto_map" in config:
        raise PackagingError(
            f"merge: {shown(adapter.name)} is not allowed: the model runs code of its own, which the export does not;"
            " without merge= the adapter is written beside the base"
        )
    named = config.get("architectures") or [""]
    architecture = getattr(transformers, str(named[0]), None) or transformers.AutoModel
    try:
        base = architecture.from_pretrained(str(config_file(model_dir).parent), dtype="auto")
        model = peft.PeftModel(base, peft.PeftConfig.from_pretrained(str(adapter)), adapter_name=adapter.name)
        loaded = model.load_adapter(str(adapter), adapter.name)
        unknown = list(loaded.unexpected_keys)
        merged = None if unknown else model.merge_and_unload()
    except Exception as error:  # of peft and transformers
        raise PackagingError(f"merge: {shown(adapter.name)} cannot be merged: {reason(error)}") from None
    if merged is None:
        raise PackagingError(f"merge: {shown(adapter.name)} does not fit the whole model: it has {shown(unknown[0])}")
    return merged
