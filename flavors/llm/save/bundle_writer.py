"""Write a ``Bundle``: the parts of a model under its root, with checks that they fit together."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ....serving.interface.bundle import Bundle, CrossEncoderSpec, EmbeddingSpec, ImageSpec
from ....serving.interface.errors import PackagingError, shown
from ....serving.interface.request import POOLED, Task
from ....serving.interface.settings import EngineSettings
from ....serving.interface.tool_format import ToolFormat
from ....serving.tool_calls.detect import formats_of
from ..model import templates as chat_templates
from ..model.base_model import PinnedBase
from ..model.bundle_reader import read_bundle
from ..model.manifest import BaseReference, Manifest, describe, write
from ..model.manifest import read as read_manifest
from ..model.tasks import (
    config_file,
    cross_encoder_spec,
    embedding_spec,
    is_causal,
    parse_tasks,
    read_config,
    reads_images,
    resolve_tasks,
)
from .adapter_templates import place_adapter_templates
from .adapters import check_adapters, place_adapters
from .checkpoints import read_shapes
from .draft_check import check_draft
from .encoder_trial import try_encoder, try_images
from .images import check_templates, image_spec
from .meta_model import build, check_complete, check_settings, check_supported, check_weights, count, decoder_of
from .quantised import check_directory, quantization_in
from .quantize import check_quantize, quantize_weights
from .sources import Placed, place_model
from .text_alone import check_images, hint, place_text
from .tokenizers import check_vocabulary, load_tokenizer, place_tokenizer


class Parts(Struct, frozen=True, kw_only=True):
    """The arguments of ``save_model`` that are parts of the model. ``model`` or ``base`` is set, not both.

    ``over`` is the base that ``base`` names, set once it has been fetched.
    """

    model: Any = None
    base: str | None = None
    over: PinnedBase | None = None
    tokenizer: Any = None
    adapters: dict[str, Any] | None = None
    chat_template: chat_templates.Templates = None
    task: Any = None
    embedding: Any = None
    tool_format: ToolFormat | None = None
    default_adapter: str | None = None
    quantize: Any = None
    calibration: Any = None
    revision: str | None = None
    images: bool | None = None
    link: bool = False
    settings: EngineSettings = EngineSettings()

    @property
    def trust_remote_code(self) -> bool:
        return self.settings.trust_remote_code

    @property
    def is_ours(self) -> bool:
        """Whether this package's own engine runs the model, with its own weights and architectures."""
        return self.settings.engine == "native"

    @property
    def quantization(self) -> str | None:
        """How the linears are stored, or will be; None: as floats."""
        found: str | None = self.quantize if self.over is None else read_manifest(self.over.root).quantization
        return found


class Written(Struct, frozen=True, kw_only=True):
    """A model that was written: its manifest, the directory with its own files (the base's, for adapters alone), how
    many parameters it has, and how many tokens its context."""

    manifest: Manifest
    model_dir: Path
    parameters: int
    context_length: int


def check_parts(parts: Parts) -> None:
    """Raise ``PackagingError`` for parts that do not go together, before anything is read or fetched."""
    if (parts.model is None) == (parts.base is None):
        raise PackagingError("model: pass either model= or, for an adapter over a registered model, base=")
    check_quantize(
        parts.quantize, calibration=parts.calibration, base=parts.base, trust_remote_code=parts.trust_remote_code
    )
    if parts.base is None:
        return
    if not parts.adapters:
        raise PackagingError("base: it needs adapters= to put over it")
    for field, value in (("embedding", parts.embedding), ("revision", parts.revision), ("images", parts.images)):
        if value is not None:
            raise PackagingError(
                f"{field}: {shown(value)} is not allowed with base=: expected None, the base has its own"
            )


def write_bundle(root: Path, parts: Parts) -> Written:
    """Write model, tokenizer, adapters, templates and manifest under ``root``.

    Raises ``PackagingError`` for anything that would fail when the model is served.
    """
    return _write_whole(root, parts) if parts.over is None else _write_over_base(root, parts, parts.over)


def _write_whole(root: Path, parts: Parts) -> Written:
    model_dir = root / "model"
    placed = _place_text(root, parts) if parts.images is False else _place_whole(model_dir, parts)
    source = placed.tokenizer if parts.tokenizer is None else parts.tokenizer
    if parts.images is False:  # a processor's files are of no use
        source = getattr(source, "tokenizer", source)
    if source is None:
        raise PackagingError("tokenizer: a model object brings none; pass tokenizer= (an object or a directory)")
    config = read_config(model_dir)
    with _hint(model_dir, config):
        whole = build(model_dir, trust_remote_code=parts.trust_remote_code)
        if parts.is_ours:
            check_weights(whole, read_shapes(model_dir))
        if reads_images(config):
            check_images(whole)
        skeleton = decoder_of(whole, model_dir)
        if parts.is_ours:
            check_supported(skeleton, causal=is_causal(config))
    place_tokenizer(source, root / "tokenizer", link=parts.link)
    tokenizer = load_tokenizer(root / "tokenizer", trust_remote_code=parts.trust_remote_code)
    check_vocabulary(tokenizer, model_dir)
    found = chat_templates.collect(parts.chat_template, tokenizer)
    names = place_adapters(parts.adapters, placed.peft_model, root, link=parts.link)
    check_adapters(names, root, skeleton)
    own = _place_adapter_templates(root, parts, tokenizer, found, parts=reads_images(config))
    tasks = resolve_tasks(parts.task, model_dir, found, of_adapters=own)
    images = None
    quantization = parts.quantization
    if parts.is_ours:
        folder = config_file(model_dir).parent
        quantization = quantization_in(folder, tasks, parts.quantize, own_code=parts.trust_remote_code)
    if reads_images(config):
        _check_beside_images(parts, tasks)
        if parts.is_ours:
            check_directory(model_dir, even_known=True)
        with _hint(model_dir, config):
            images = image_spec(model_dir, root / "tokenizer", whole.config)
    check_complete(model_dir, tasks, trust_remote_code=parts.trust_remote_code)
    is_used = "chat" in tasks or parts.chat_template is not None
    with _hint(model_dir, config):
        _place_templates(found, tokenizer, root, images, check=is_used)
    spec = embedding_spec(tasks, model_dir, root / "tokenizer", parts.embedding)
    crosses = cross_encoder_spec(tasks, model_dir, root / "tokenizer", tokenizer)
    formats = formats_of(found, tokenizer, parts.tool_format)
    longest = EmbeddingSpec(max_length=crosses.max_length) if crosses is not None else spec or EmbeddingSpec()
    settings = parts.settings
    if quantization is not None and settings.quantization == "none":
        settings = msgspec.structs.replace(settings, quantization=quantization)
    context = check_settings(skeleton, settings, tasks, longest, quantization)
    check_draft(settings)
    if images is not None:
        with _hint(model_dir, config):
            try_images(whole, _as_engine_sees(root, tasks, spec, crosses, images), parts.settings)
    if POOLED.intersection(tasks):
        try_encoder(skeleton, _as_engine_sees(root, tasks, spec, crosses), parts.settings)
    if parts.quantize is not None:
        quantize_weights(model_dir, tasks, parts.quantize, parts.calibration, tokenizer)
    manifest = _finish(
        root, parts, tasks, names,
        embedding=spec, cross_encoder=crosses, tool_formats=formats, quantization=quantization, images=images,
    )  # fmt: skip
    return Written(manifest=manifest, model_dir=model_dir, parameters=count(whole), context_length=context)


def _place_whole(model_dir: Path, parts: Parts) -> Placed:
    return place_model(parts.model, model_dir, link=parts.link, revision=parts.revision, any_weights=not parts.is_ours)


def _place_text(root: Path, parts: Parts) -> Placed:
    """Write the text of a model of several modalities alone, from a copy of the whole that is removed again."""
    whole = root / "whole"
    placed = place_model(parts.model, whole, link=True, revision=parts.revision)
    if placed.peft_model is not None:
        raise PackagingError("images: False is not allowed with a PeftModel; expected None, or its merged model")
    place_text(whole, root / "model")
    shutil.rmtree(whole)
    return placed


@contextlib.contextmanager
def _hint(model_dir: Path, config: dict[str, Any]) -> Iterator[None]:
    """Add to a refusal within the block that the text of the model can be logged alone, if it has other parts."""
    try:
        yield
    except PackagingError as error:
        raise PackagingError(f"{error}{hint(model_dir, config)}") from None


def _place_templates(
    found: dict[str, str], tokenizer: Any, root: Path, images: ImageSpec | None, *, check: bool
) -> None:
    """Check the templates, and that they have places for images if the model reads them; write them."""
    if check:
        chat_templates.check(found, tokenizer, parts=images is not None)
    if images is not None:
        check_templates(found, tokenizer, images)
    chat_templates.write(found, root)


def _place_adapter_templates(root: Path, given: Parts, tokenizer: Any, found: dict[str, str], *, parts: bool) -> bool:
    return place_adapter_templates(
        given.adapters,
        root,
        tokenizer,
        found,
        given=given.chat_template is not None,
        parts=parts,
        trust_remote_code=given.trust_remote_code,
    )


def _check_beside_images(parts: Parts, tasks: tuple[Task, ...]) -> None:
    """Raise ``PackagingError`` for arguments that vision-language models do not take."""
    if POOLED.intersection(tasks):
        raise PackagingError(f"task: {tasks[0]!r} is not allowed for a model that reads images; it writes text")
    if parts.quantize is not None:
        raise PackagingError(
            f"quantize: {parts.quantize!r} is not allowed for a model that reads images; expected None:"
            " quantization='int8' quantises its decoder at each start"
        )
    if parts.trust_remote_code:
        raise PackagingError("trust_remote_code: True is not allowed for a model that reads images; expected False")


def _as_engine_sees(
    root: Path,
    tasks: tuple[Task, ...],
    spec: EmbeddingSpec | None,
    crosses: CrossEncoderSpec | None,
    images: ImageSpec | None = None,
) -> Bundle:
    """Return the model being written, before it has a content hash."""
    return Bundle(
        content_hash="",
        tasks=tasks,
        model_dir=str(root / "model"),
        tokenizer_dir=str(root / "tokenizer"),
        embedding=spec,
        cross_encoder=crosses,
        images=images,
    )


def _write_over_base(root: Path, parts: Parts, over: PinnedBase) -> Written:
    """Write adapters alone: the base is not copied but referred to by URI and content hash."""
    base = read_bundle(over.root)
    names = place_adapters(parts.adapters, None, root, link=parts.link)
    if twice := sorted(set(names) & base.adapters.keys()):
        raise PackagingError(f"adapters: the base already has an adapter {twice[0]!r}; choose another name")
    base_dir = Path(base.model_dir)
    whole = build(base_dir, trust_remote_code=parts.trust_remote_code)
    skeleton = decoder_of(whole, base_dir)
    check_adapters(names, root, skeleton)
    tokenizer_dir = Path(base.tokenizer_dir)
    if parts.tokenizer is not None:
        tokenizer_dir = root / "tokenizer"
        place_tokenizer(parts.tokenizer, tokenizer_dir, link=parts.link)
        check_vocabulary(load_tokenizer(tokenizer_dir), Path(base.model_dir))
    tokenizer = load_tokenizer(tokenizer_dir, trust_remote_code=parts.trust_remote_code)
    of_base = {name: Path(path).read_text(encoding="utf-8") for name, path in base.chat_templates.items()}
    own = _place_adapter_templates(root, parts, tokenizer, of_base, parts=base.images is not None)
    formats: dict[str, ToolFormat] = {}
    if parts.tool_format is not None:
        formats = dict.fromkeys(base.chat_templates, parts.tool_format)
    if parts.chat_template is not None:
        found = chat_templates.collect(parts.chat_template, tokenizer)
        _place_templates(found, tokenizer, root, base.images, check=True)
        formats = formats_of(found, tokenizer, parts.tool_format)
    tasks = _tasks_over(base, parts, chats=own)
    longest = base.embedding or EmbeddingSpec()
    context = check_settings(skeleton, parts.settings, tasks, longest, parts.quantization)
    check_draft(parts.settings)
    manifest = _finish(
        root, parts, tasks, [*names, *base.adapters],
        base=over.reference, tool_formats=formats, quantization=parts.quantization, images=base.images,
    )  # fmt: skip
    return Written(manifest=manifest, model_dir=base_dir, parameters=count(whole), context_length=context)


def _tasks_over(base: Bundle, parts: Parts, *, chats: bool) -> Any:
    """Return the tasks of the adapters: those of the base and, with a chat template of their own, chats."""
    known = base.tasks if not chats or "chat" in base.tasks else ("chat", *base.tasks)
    if parts.task is None:
        return known
    tasks = parse_tasks(parts.task)
    if lacking := [task for task in tasks if task not in known]:
        raise PackagingError(f"task: the base cannot answer {lacking[0]!r}; it answers {', '.join(known)}")
    return tasks


def _finish(
    root: Path,
    parts: Parts,
    tasks: Any,
    adapters: list[str],
    *,
    base: BaseReference | None = None,
    embedding: Any = None,
    cross_encoder: Any = None,
    tool_formats: dict[str, ToolFormat],
    quantization: str | None = None,
    images: ImageSpec | None = None,
) -> Manifest:
    default = () if parts.default_adapter is None else (parts.default_adapter,)
    for field, names in (("default_adapter", default), ("pinned_adapters", parts.settings.pinned_adapters)):
        for name in names:
            if name not in adapters:
                known = ", ".join(sorted(adapters)) or "none"
                raise PackagingError(f"{field}: {shown(name)} is not an adapter of the model; it has {known}")
    manifest = describe(
        root,
        tasks=tasks,
        base=base,
        default_adapter=parts.default_adapter,
        embedding=embedding,
        cross_encoder=cross_encoder,
        tool_formats=tool_formats,
        quantization=quantization,
        images=images,
    )
    write(manifest, root)
    return manifest
