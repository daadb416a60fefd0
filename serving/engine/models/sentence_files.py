"""The files of a sentence-transformers directory that shape its vectors, read as the library itself reads them.

::

    modules.json                        [{"type": "…Transformer", "path": ""}, {"type": "…Pooling", …}, …]
    sentence_bert_config.json           beside the transformer; up to 5.x max_seq_length and do_lower_case, from 6.0 on
                                        transformer_task, modality_config, processing_kwargs
    <pooling path>/config.json          pooling_mode, or pooling_mode_mean_tokens …
    <dense path>/config.json            activation_function, use_residual, module_input_name, module_output_name
    config_sentence_transformers.json   model_type, prompts, default_prompt_name, truncate_dim
    tokenizer_config.json               model_max_length

Everything that would change a vector is read, or refused by its name. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ...interface.bundle import POOLING_MODES, EmbeddingSpec, HeadModule
from ...interface.errors import PackagingError, shown

OWN_CLASSES = "sentence_transformers."  # other classes are a model's own code
HEAD_MODULES = ("Dense", "LayerNorm", "Normalize", "Dropout")
EXPECTED = "expected Transformer, Pooling and then, if wanted, Dense, LayerNorm, Normalize"
TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
LEGACY_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Classes of torch.nn that the library makes without arguments, and that compute each value from one alone.
ACTIVATIONS = ("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "SELU", "Softplus", "Mish")
TEXT_MODALITY = {"method": "forward", "method_output_name": "last_hidden_state"}
UNBOUNDED = 10**9  # tokenizers without a maximum length give this or more
# Options that change how a model or tokenizer is loaded, but no vector.
HARMLESS = {
    "model_kwargs": {"trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "use_safetensors"},
    "processor_kwargs": {"trust_remote_code", "use_fast", "padding_side", "model_max_length"},
    "config_kwargs": {"trust_remote_code", "use_cache"},
}
OLD_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
HARMLESS_PROCESSING = {"padding", "return_tensors", "pad_to_multiple_of", "max_length"}


class Module(NamedTuple):
    """An entry of modules.json: its class without the package, and its folder."""

    kind: str
    path: str


def modules_of(model_dir: str | Path) -> list[Module]:
    """Return the modules in ``model_dir``; [] if it is no sentence-transformers directory. Raises ``PackagingError``
    for code of the model's own and for folders outside ``model_dir``."""
    file = Path(model_dir) / "modules.json"
    if not file.is_file():
        return []
    entries = _read(file)
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str)
        for entry in entries
    ):
        raise PackagingError("modules.json is not a list of modules with type and path")
    found = []
    for entry in entries:
        path = PurePosixPath(entry["path"])
        if path.is_absolute() or ".." in path.parts:
            raise PackagingError(f"modules.json: path {shown(entry['path'])} leaves the model's directory")
        if not entry["type"].startswith(OWN_CLASSES):
            raise PackagingError(
                f"modules.json: {shown(entry['type'])} is code of the model's own, which is not run; {EXPECTED}"
            )
        found.append(Module(entry["type"].rpartition(".")[2], entry["path"]))
    return found


def check_modules(model_dir: str | Path) -> None:
    """Raise ``PackagingError`` if the modules in ``model_dir`` are not those of an embedding model that can run."""
    kinds = [module.kind for module in modules_of(model_dir)]
    kind = _object(Path(model_dir) / "config_sentence_transformers.json").get("model_type") or "SentenceTransformer"
    if kind != "SentenceTransformer":
        raise PackagingError(
            f"config_sentence_transformers.json: model_type {shown(kind)} is not supported for embeddings;"
            " expected SentenceTransformer"
        )
    known = kinds[:2] == ["Transformer", "Pooling"] and all(kind in HEAD_MODULES for kind in kinds[2:])
    if not known:
        raise PackagingError(f"sentence-transformers modules {', '.join(kinds)} are not supported; {EXPECTED}")


def transformer_dir(model_dir: str | Path) -> Path:
    """Return the folder of the transformer in ``model_dir``: a sub-directory in older sentence-transformers layouts."""
    root = Path(model_dir)
    return root / next((module.path for module in modules_of(root) if module.kind == "Transformer"), "")


def read_spec(model_dir: str | Path, tokenizer_dir: str | Path | None = None) -> EmbeddingSpec | None:
    """Read how ``model_dir`` makes a vector of a text; None if it is no sentence-transformers directory.

    ``tokenizer_dir`` has the tokenizer's files, None: the directory of the transformer. Raises ``PackagingError``,
    which names what is not supported.
    """
    root = Path(model_dir)
    modules = modules_of(root)
    if not modules:
        return None
    check_modules(root)
    transformer = root / modules[0].path
    tokenizer = transformer if tokenizer_dir is None else Path(tokenizer_dir)
    limits, name = _transformer_config(transformer)
    if limits.get("do_lower_case") and not _tokenizer_lowercases(tokenizer):
        raise PackagingError(
            f"{name}: do_lower_case true is not supported; expected false, or a tokenizer.json whose normalizer"
            " lowercases"
        )
    _check_task(limits, name)
    options = _load_options(limits, name)
    texts = _object(root / "config_sentence_transformers.json")
    prompts, default = _prompts(texts)
    pooling = _object(root / modules[1].path / "config.json")
    if pooling.get("include_prompt") is False:
        raise PackagingError("pooling with include_prompt=False is not supported; expected True")
    truncate_dim = texts.get("truncate_dim")
    if truncate_dim is not None and (not isinstance(truncate_dim, int) or truncate_dim < 1):
        raise PackagingError(f"truncate_dim: {shown(truncate_dim)} is not allowed; expected a positive integer or null")
    head = [step for module in modules[2:] for step in _head_module(module, root)]
    # the library normalises before it truncates, and not again
    normalize = truncate_dim is None and bool(head) and head[-1].kind == "normalize"
    return EmbeddingSpec(
        pooling=_mode(pooling),
        head=tuple(head[:-1] if normalize else head),
        normalize=normalize,
        truncate_dim=truncate_dim,
        max_length=_max_length(limits, options, name) or max_length_of(tokenizer),
        prompts=prompts,
        default_prompt=default,
    )


def max_length_of(tokenizer_dir: str | Path) -> int | None:
    """Return the most tokens that the tokenizer's files allow; None for no limit."""
    max_length = _object(Path(tokenizer_dir) / "tokenizer_config.json").get("model_max_length")
    return int(max_length) if isinstance(max_length, int | float) and 0 < max_length < UNBOUNDED else None


def _transformer_config(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the first of the transformer's configurations that has entries, and its name."""
    for name in TRANSFORMER_CONFIGS:
        if found := _object(folder / name):
            return {OLD_NAMES.get(key, key): value for key, value in found.items()}, name
    return {}, TRANSFORMER_CONFIGS[0]


def _check_task(config: dict[str, Any], name: str) -> None:
    """Raise ``PackagingError`` unless vectors are the last hidden states of a text's tokens."""
    if (task := config.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise PackagingError(
            f"{name}: transformer_task {shown(task)} is not supported for embeddings; expected feature-extraction"
        )
    modalities = config.get("modality_config", {"text": TEXT_MODALITY})
    if not isinstance(modalities, dict) or "text" not in modalities:
        raise PackagingError(f"{name}: modality_config {shown(modalities)} reads no text; expected one that does")
    if "message" in modalities:
        raise PackagingError(
            f"{name}: modality_config has 'message': the library writes each text and prompt by the chat template,"
            " which is not supported for embeddings; expected 'text' without 'message'"
        )
    if modalities["text"] != TEXT_MODALITY:
        raise PackagingError(
            f"{name}: modality_config {shown(modalities['text'])} for text is not supported; expected {TEXT_MODALITY}"
        )
    if (output := config.get("module_output_name", "token_embeddings")) != "token_embeddings":
        raise PackagingError(f"{name}: module_output_name {shown(output)} is not supported; expected token_embeddings")
    for key in ("query_length", "document_length", "query_expansion"):
        if config.get(key) is not None:
            raise PackagingError(f"{name}: {key} {shown(config[key])} is not supported; expected null")


def _load_options(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the options for loading the tokenizer. Raises ``PackagingError`` for options that change a vector."""
    for field, harmless in HARMLESS.items():
        given = config.get(field) or {}
        if unknown := sorted(set(given) - harmless):
            raise PackagingError(f"{name}: {field}.{unknown[0]} {shown(given[unknown[0]])} is not supported")
    options = config.get("processing_kwargs") or {}
    for part in ("common", "text"):
        for key, value in (options.get(part) or {}).items():
            if key not in HARMLESS_PROCESSING and (key, value) not in (
                ("truncation", True), ("truncation", "longest_first"), ("add_special_tokens", True)
            ):  # fmt: skip
                raise PackagingError(f"{name}: processing_kwargs.{part}.{key} {shown(value)} is not supported")
    return dict(config.get("processor_kwargs") or {})


def _max_length(config: dict[str, Any], options: dict[str, Any], name: str) -> int | None:
    """Return the length limit in the transformer's configuration; None if the tokenizer's counts."""
    processing = config.get("processing_kwargs") or {}
    given = [
        (processing.get("common") or {}).get("max_length"),
        (processing.get("text") or {}).get("max_length"),
        options.get("model_max_length", config.get("max_seq_length")),
    ]
    found = next((length for length in given if length is not None), None)
    if found is not None and (not isinstance(found, int) or found < 1):
        raise PackagingError(f"{name}: a length of {shown(found)} is not allowed; expected a positive integer or null")
    return found if found is None or found < UNBOUNDED else None


def _prompts(config: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default. Raises ``PackagingError`` for one that is not there."""
    prompts = {str(key): "" if text is None else str(text) for key, text in (config.get("prompts") or {}).items()}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts and default not in ("query", "document"):
        raise PackagingError(
            f"default_prompt_name: {shown(default)} is not allowed; expected null or one of"
            f" {', '.join(prompts) or 'no prompt: there is none'}"
        )
    return prompts, default


def _head_module(module: Module, root: Path) -> Iterator[HeadModule]:
    """Yield the step of a module after pooling; nothing for dropout, which does nothing when a model is used."""
    config = _object(root / module.path / "config.json")
    for field in ("module_input_name", "module_output_name"):
        if (config.get(field) or "sentence_embedding") != "sentence_embedding":
            raise PackagingError(
                f"{module.path}: {field} {shown(config[field])} is not supported; expected sentence_embedding"
            )
    if module.kind == "Dense":
        yield HeadModule(
            kind="dense",
            path=module.path,
            activation=_activation(config, module),
            residual=bool(config.get("use_residual")),
        )
    elif module.kind == "LayerNorm":
        yield HeadModule(kind="layer_norm", path=module.path)
    elif module.kind == "Normalize":
        yield HeadModule(kind="normalize")


def _activation(config: dict[str, Any], module: Module) -> str:
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    package, _, name = str(named).rpartition(".")
    if not package.startswith("torch.nn.modules") or name not in ACTIVATIONS:
        raise PackagingError(
            f"{module.path}: activation_function {shown(named)} is not supported; expected one of torch.nn's"
            f" {', '.join(ACTIVATIONS)}"
        )
    return name


def _tokenizer_lowercases(folder: Path) -> bool:
    """Return whether the tokenizer lowercases itself, as ``do_lower_case`` asks; sentence-transformers would do it
    again."""
    normalizer = _object(folder / "tokenizer.json").get("normalizer") or {}
    steps = normalizer.get("normalizers") or [normalizer]
    return any(
        step.get("type") == "Lowercase" or (step.get("type") == "BertNormalizer" and step.get("lowercase"))
        for step in steps
    )


def _mode(config: dict[str, Any]) -> str:
    """Return the pooling mode, or several joined by ``+`` in the order of their parts of the vector."""
    given = config.get("pooling_mode") or [mode for key, mode in LEGACY_KEYS.items() if config.get(key)] or ["mean"]
    modes = [given] if isinstance(given, str) else list(given)
    if unknown := [mode for mode in modes if mode not in POOLING_MODES]:
        raise PackagingError(f"pooling {shown(unknown[0])} is not supported; expected {', '.join(POOLING_MODES)}")
    return "+".join(modes)


def _object(path: Path) -> dict[str, Any]:
    found = _read(path)
    if not isinstance(found, dict):
        raise PackagingError(f"{path.name} is not a JSON object")
    return found


def _read(path: Path) -> Any:
    """Return the file's JSON; {} if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise PackagingError(f"{path.name} cannot be read: {error}") from None
