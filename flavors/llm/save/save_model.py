"""``save_model`` and ``log_model``: save a language model with everything it needs as one MLflow model."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec
from mlflow import pyfunc
from mlflow.models import Model, ModelSignature
from mlflow.models.model import MLMODEL_FILE_NAME, ModelInfo
from mlflow.models.utils import _save_example
from mlflow.tracking._model_registry import DEFAULT_AWAIT_MAX_SLEEP_SECONDS
from mlflow.utils.file_utils import get_total_file_size
from mlflow.utils.model_utils import _validate_and_copy_code_paths

from ....serving.interface.errors import PackagingError, reason
from ..errors import raises_mlflow
from ..model import generation_config as generation_configs
from ..model import manifest as manifests
from ..model import model_config as configs
from ..model.base_model import pinned_base
from ..model.bundle_reader import saved_keys
from ..model.manifest import Manifest
from ..model.names import FLAVOR_NAME, LOADER_MODULE
from ..model.options import EngineOptions
from ..model.signature import default_example, lossless_signature
from ..model.stored_facts import FACTS, Facts
from ..model.templates import Templates
from . import mlflow_requirements, registry_pages, tool_formats
from .adapter_sources import check_runs, fetch_adapters
from .arguments import check_types, plain_metadata
from .bundle_writer import Parts, check_parts, write_bundle
from .facts import facts_of
from .file_modes import apply_umask
from .requirements import CONDA_ENV, PYTHON_ENV, Requirements, check_requirements, write_environment

logger = logging.getLogger(__name__)
mlflow_requirements.install()


@raises_mlflow
def save_model(
    path: str | os.PathLike[str],
    model: Any = None,
    tokenizer: Any = None,
    adapters: dict[str, Any] | None = None,
    chat_template: Templates = None,
    task: str | list[str] | None = None,
    base: str | None = None,
    default_adapter: str | None = None,
    adapter_runs: dict[str, str] | None = None,
    defaults: dict[str, Any] | None = None,
    generation_config: Any = None,
    embedding: Any = None,
    tool_format: tool_formats.Given = None,
    quantize: Literal["int8", "int4"] | None = None,
    calibration: list[str] | None = None,
    revision: str | None = None,
    images: bool | None = None,
    mlflow_model: Model | None = None,
    signature: ModelSignature | None = None,
    input_example: Any = None,
    metadata: dict[str, Any] | None = None,
    pip_requirements: Requirements = None,
    extra_pip_requirements: Requirements = None,
    conda_env: Any = None,
    code_paths: list[str] | None = None,
    model_config: dict[str, Any] | str | None = None,
    link_files: bool = False,
    validate_serving_input: bool = True,
    **settings: Unpack[EngineOptions],
) -> None:
    """Save a language model to the local directory ``path`` as an MLflow model.

    Args:
        path: where to save the model; the directory must be empty or not exist yet.
        model: a ``PreTrainedModel``; a ``PeftModel`` (its base and adapters are stored separately); a Hugging Face or
            sentence-transformers directory (its files are stored unchanged); a GGUF file; or a hub id.
        tokenizer: a transformers tokenizer, or a directory. None: the tokenizer in the model directory.
        adapters: adapters by name, each a ``PeftModel``, a directory in peft's layout, or a ``runs:/`` or ``models:/``
            URI of one, whose run and datasets are recorded.
        chat_template: a template, its path, or several by name (``{"default": …, "tool_use": …}``). None: the
            tokenizer's own.
        task: "chat", "completions", "embeddings", "score" (a cross-encoder), or a list of several. None: every task
            that the model can do.
        base: URI of a registered model (``models:/assistant/3``) on which the ``adapters`` are logged alone, with
            ``model=None``. They inherit what the base was saved with unless you override it here (docs/adapters.md).
        default_adapter: the adapter for requests that name none. None: the base answers such requests; with ``base``,
            the default adapter of that model does.
        adapter_runs: ids of the MLflow runs that trained adapters, by their names, where no URI says so. None: those
            that ``log_model`` finds by itself (docs/adapters.md).
        defaults: values for request fields that a request leaves out, such as ``{"max_tokens": 256}``.
        generation_config: the model's own sampling defaults, which ``defaults`` override: a dict or a
            ``transformers.GenerationConfig``; ``{}`` for none. None: the model's ``generation_config.json``.
        embedding: pooling and prompts (``serving.bundle.EmbeddingSpec`` or some of its fields). None: the model's own.
        tool_format: how the model writes tool calls: the name of a known format ("hermes"), a ``ToolFormat``, or a dict
            of its fields. None: detected from the chat templates and the tokenizer.
        quantize: "int8" stores the model's linears quantised instead of as they came, bit for bit as an engine with
            ``quantization="int8"`` would quantise them at each start (docs/quantize.md). "int4", for decoders only,
            stores in four bits the linears that tolerate it. None: weights are stored as they are.
        calibration: texts like those that the model will see. Together with text that the model generates itself, they
            decide how quantised weights are chosen; the first 16,384 tokens are used. None: Python's own documentation
            for int4; int8 weights are rounded each by itself.
        revision: branch, tag or commit of the hub repository; ``model`` must then be a hub id.
        images: False logs the text of a model that also reads images or sounds, without its processor; the model is
            loaded into memory once. None: images are read, and a model whose images are not supported is refused.
        mlflow_model: the ``mlflow.models.Model`` to add this flavor to.
        signature: a signature for MLflow to enforce. None: a lossless one, which passes on every request field.
        input_example: an example request, which MLflow runs when the model is logged. None saves a default example,
            which is not run; False saves none.
        metadata: a dict to save in the MLmodel file.
        pip_requirements: replaces the default list; extra_pip_requirements adds to it; conda_env gives its pip part.
        code_paths: local files or folders to store with the model and to put on Python's path when it is loaded.
        model_config: settings by name, or the path of a YAML file with them.
        link_files: hard-link the files of a local directory instead of copying them. Both then share the same bytes.
        validate_serving_input: whether MLflow runs the example when the model is logged.
        settings: engine settings (``serving.settings.EngineSettings``), such as ``dtype="bfloat16"``.

    Raises:
        MlflowException: ``errors.PackagingError`` if an argument is not allowed or the model would fail when served;
            the message names the argument. Nothing is left in ``path``.
    """
    check_types(
        path=path,
        mlflow_model=mlflow_model,
        signature=signature,
        pip_requirements=pip_requirements,
        extra_pip_requirements=extra_pip_requirements,
        code_paths=code_paths,
        link_files=link_files,
        validate_serving_input=validate_serving_input,
        images=images,
    )
    mlflow_model = mlflow_model if mlflow_model is not None else Model()
    # log_model's are in the model already
    metadata = plain_metadata(mlflow_model.metadata) | plain_metadata(metadata)
    own = _given(default_adapter=default_adapter, defaults=defaults, generation_config=generation_config)
    given = configs.merge(model_config, dict(settings), own)
    config = configs.parse(given)
    parts = Parts(
        model=model,
        base=base,
        tokenizer=tokenizer,
        adapters=adapters,
        chat_template=chat_template,
        task=task,
        embedding=embedding,
        tool_format=tool_formats.parse(tool_format),
        default_adapter=config.default_adapter,
        quantize=quantize,
        calibration=calibration,
        revision=revision,
        images=images,
        link=link_files,
        settings=config.settings,
    )
    check_parts(parts)
    check_requirements(
        pip_requirements=pip_requirements, extra_pip_requirements=extra_pip_requirements, conda_env=conda_env
    )
    root = Path(path).absolute()
    existed = root.exists()
    _prepare(root)
    try:
        values = given
        if base is not None:
            over = pinned_base(str(base))
            values = configs.over_base(saved_keys(over.root, manifests.read(over.root).default_adapter), given)
            config = configs.parse(values)
            parts = msgspec.structs.replace(parts, over=over, default_adapter=config.default_adapter)
        config = _as_stored(config, parts.quantization, asked=given.get("quantization"))
        parts = msgspec.structs.replace(parts, settings=config.settings)
        with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as scratch:
            sources = fetch_adapters(adapters, adapter_runs, Path(scratch), model=model, logged_by=mlflow_model)
            written = write_bundle(root, msgspec.structs.replace(parts, adapters=sources.given))
        manifest, model_dir = written.manifest, written.model_dir
        config = _as_stored(config, manifest.quantization, asked=given.get("quantization"))
        check_runs(adapter_runs, manifest.adapters)
        facts = facts_of(
            root,
            model_dir,
            manifest,
            model=model,
            parameters=written.parameters,
            context_length=written.context_length,
            lineages=sources.lineages,
        )
        found, without_effect = generation_configs.read(model_dir)
        if values.get("generation_config") is None:
            config = msgspec.structs.replace(config, generation_config=found)
            _warn(without_effect)
        write_environment(
            root,
            pip_requirements=pip_requirements,
            extra_pip_requirements=extra_pip_requirements,
            conda_env=conda_env,
            images=manifest.images is not None,
        )
        manifest = manifests.with_environment(manifest, root)
        manifests.write(manifest, root)
        _describe(mlflow_model, manifest, config, signature, metadata)
        _write_mlmodel(root, mlflow_model, manifest, config, facts, code_paths, without_effect)
        example = _example(input_example, manifest, run_at_log_time=mlflow_model.model_id and validate_serving_input)
        try:
            _save_example(mlflow_model, example, str(root))
        except TypeError as error:  # of json
            raise PackagingError(f"input_example: {reason(error)}") from None
        mlflow_model.model_size_bytes = get_total_file_size(root)
        mlflow_model.save(str(root / MLMODEL_FILE_NAME))
        apply_umask(root, copy_links=bool(mlflow_model.model_id))
    except BaseException:
        _remove_partial(root, keep_folder=existed)
        raise


@raises_mlflow
def log_model(
    model: Any = None,
    name: str | None = None,
    tokenizer: Any = None,
    adapters: dict[str, Any] | None = None,
    chat_template: Templates = None,
    task: str | list[str] | None = None,
    *,
    base: str | None = None,
    default_adapter: str | None = None,
    adapter_runs: dict[str, str] | None = None,
    defaults: dict[str, Any] | None = None,
    generation_config: Any = None,
    embedding: Any = None,
    tool_format: tool_formats.Given = None,
    quantize: Literal["int8", "int4"] | None = None,
    calibration: list[str] | None = None,
    revision: str | None = None,
    images: bool | None = None,
    signature: ModelSignature | None = None,
    input_example: Any = None,
    metadata: dict[str, Any] | None = None,
    pip_requirements: Requirements = None,
    extra_pip_requirements: Requirements = None,
    conda_env: Any = None,
    code_paths: list[str] | None = None,
    model_config: dict[str, Any] | str | None = None,
    link_files: bool = True,
    registered_model_name: str | None = None,
    await_registration_for: int | None = DEFAULT_AWAIT_MAX_SLEEP_SECONDS,
    prompts: list[Any] | None = None,
    params: dict[str, Any] | None = None,
    tags: dict[str, Any] | None = None,
    model_type: str | None = None,
    step: int = 0,
    model_id: str | None = None,
    run_id: str | None = None,
    resources: Any = None,
    auth_policy: Any = None,
    artifact_path: str | None = None,
    **settings: Unpack[EngineOptions],
) -> ModelInfo:
    """Log a language model to MLflow, and register it if ``registered_model_name`` is given.

    MLflow's pages show what the model is: size, type, licence, context and adapters are params, tags and a description
    of the logged model and of the registered version. What you set yourself is kept.

    The arguments from ``registered_model_name`` to ``auth_policy`` are those of ``mlflow.models.Model.log``; all others
    are those of ``save_model``. ``link_files`` is on by default: the files are uploaded from a temporary directory that
    is removed at once. ``artifact_path`` is the old name of ``name``, which MLflow has deprecated.

    Returns:
        MLflow's description of the logged model, with its ``model_uri`` and ``model_id``.

    Raises:
        MlflowException: ``errors.PackagingError`` if an argument is not allowed or the model would fail when served;
            the message names the argument. MLflow's store may raise others.
    """
    configs.parse(dict(settings))  # other names would be taken for arguments of Model.log
    info = Model.log(
        artifact_path=artifact_path,
        name=name,
        flavor=mlflow_llm_flavor(),
        registered_model_name=registered_model_name,
        await_registration_for=await_registration_for,
        metadata=metadata,
        run_id=run_id,
        resources=resources,
        auth_policy=auth_policy,
        prompts=prompts,
        model_type=model_type,
        params=params,
        tags=tags,
        step=step,
        model_id=model_id,
        model=model,
        tokenizer=tokenizer,
        adapters=adapters,
        chat_template=chat_template,
        task=task,
        base=base,
        default_adapter=default_adapter,
        adapter_runs=adapter_runs,
        defaults=defaults,
        generation_config=generation_config,
        embedding=embedding,
        tool_format=tool_format,
        quantize=quantize,
        calibration=calibration,
        revision=revision,
        images=images,
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=extra_pip_requirements,
        conda_env=conda_env,
        code_paths=code_paths,
        model_config=model_config,
        link_files=link_files,
        validate_serving_input=input_example is not None and input_example is not False,
        **settings,
    )
    registry_pages.show(info, registered_model_name, step=step)
    return info


def mlflow_llm_flavor() -> Any:
    """Return this flavor's module, which MLflow calls back."""
    import importlib

    return importlib.import_module(LOADER_MODULE)


def _prepare(root: Path) -> None:
    if root.is_file() or (root.is_dir() and any(True for _ in root.iterdir())):
        raise PackagingError(f"path: {root.name} already exists and is not empty")
    root.mkdir(parents=True, exist_ok=True)


def _as_stored(config: configs.ModelConfig, stored: Any, *, asked: Any) -> configs.ModelConfig:
    """Return ``config`` with the quantization of the stored weights. Raises ``PackagingError`` if another was asked
    for."""
    if stored is None:
        return config
    if asked is not None and asked != stored:
        raise PackagingError(f"quantization: {asked!r} is not allowed; expected {stored!r}: so the weights are stored")
    settings = msgspec.structs.replace(config.settings, quantization=stored)
    return msgspec.structs.replace(config, settings=settings)


def _describe(
    mlflow_model: Model,
    manifest: Manifest,
    config: configs.ModelConfig,
    signature: ModelSignature | None,
    metadata: dict[str, Any],
) -> None:
    mlflow_model.signature = lossless_signature() if signature is None else signature
    # MLflow and its clients read the task of an endpoint here
    task = {"task": f"llm/v1/{manifest.tasks[0]}"}
    mlflow_model.metadata = task | metadata


def _write_mlmodel(
    root: Path,
    mlflow_model: Model,
    manifest: Manifest,
    config: configs.ModelConfig,
    facts: Facts,
    code_paths: list[str] | None,
    without_effect: dict[str, Any],
) -> None:
    code = _validate_and_copy_code_paths(code_paths, str(root))
    pyfunc.add_to_model(
        mlflow_model,
        loader_module=LOADER_MODULE,
        conda_env=CONDA_ENV,
        python_env=PYTHON_ENV,
        code=code,
        model_config=config.to_dict(),
        streamable=True,
    )
    from mlflow_llm import __version__

    mlflow_model.add_flavor(
        FLAVOR_NAME,
        mlflow_llm_version=__version__,
        format_version=manifest.format_version,
        content_hash=manifest.content_hash,
        tasks=list(manifest.tasks),
        adapters=manifest.adapters,
        tool_formats={name: format.name for name, format in manifest.tool_formats.items()},
        base=manifest.base.uri if manifest.base is not None else None,
        quantization=manifest.quantization,
        request_defaults=config.request_defaults,
        generation_config_without_effect=without_effect,
        code=code,
        **{FACTS: msgspec.to_builtins(facts)},
    )


def _warn(without_effect: dict[str, Any]) -> None:
    if without_effect:
        listed = "; ".join(generation_configs.without_effect(name, value) for name, value in without_effect.items())
        logger.warning("generation_config.json: kept in the model, without effect here: %s", listed)


def _example(given: Any, manifest: Manifest, *, run_at_log_time: Any) -> Any:
    """Return the caller's example, else a default one; None if MLflow would start an engine only to run a default
    one."""
    if given is False or (given is None and run_at_log_time):
        return None
    return default_example(manifest.tasks) if given is None else given


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _remove_partial(root: Path, *, keep_folder: bool) -> None:
    """Remove the files that a refused save has written."""
    if not keep_folder:
        shutil.rmtree(root, ignore_errors=True)
        return
    for child in root.iterdir():
        shutil.rmtree(child, ignore_errors=True) if child.is_dir() else child.unlink()
