"""The files of one packaged model, as an engine and a tokenizer need them.

Layout under the root of a saved model (written by ``flavors.llm``, everything relative)::

    model/                      config.json, *.safetensors (sentence-transformers: also modules.json, 1_Pooling/ …),
                                unchanged or with quantised linears (``engine/weights/stored_weights.py``)
    tokenizer/                  the files that AutoTokenizer.from_pretrained reads
    adapters/<name>/            adapter_config.json, adapter_model.safetensors (peft's layout), and chat_template.jinja
                                if the adapter has a chat template of its own
    chat_template.jinja         the default template
    chat_templates/<name>.jinja further named templates
    manifest.json               format version, tasks, base, sizes and SHA-256 of every file above

A version that holds only an adapter has no ``model/``. Its manifest names the base by URI and content hash, and the
flavor joins the two into one ``Bundle``.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .errors import PackagingError
from .request import Activation, Task
from .tool_format import ToolFormat

ADAPTER_TEMPLATE = "chat_template.jinja"  # in the directory of an adapter that has one of its own

WEIGHTS = (".safetensors", ".gguf", ".bin")
"""The suffixes of files of weights."""

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


class HeadModule(Struct, frozen=True, kw_only=True):
    """A module that a pooled vector passes: a linear with an activation of torch.nn, a norm, or scaling to length 1.

    ``path`` is the folder of its weights in the model's directory."""

    kind: Literal["dense", "layer_norm", "normalize"]
    path: str = ""
    activation: str = "Identity"
    residual: bool = False  # its input is added to its output


class EmbeddingSpec(Struct, frozen=True, kw_only=True):
    """The way in which token vectors become one vector, and which prompts are put before the text.

    They are pooled, pass the modules of ``head`` in order, are cut to ``truncate_dim`` values, and then scaled to
    length 1 if ``normalize`` says so. ``head`` is always the one in the model's files."""

    pooling: str = "mean"  # one of POOLING_MODES, or several joined by "+", whose vectors are put one after another
    head: tuple[HeadModule, ...] = ()
    truncate_dim: int | None = None
    normalize: bool = True
    max_length: int | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


class CrossEncoderSpec(Struct, frozen=True, kw_only=True):
    """The activation for the one number that a cross-encoder gives a pair, and the most tokens that a pair may have."""

    activation: Activation = "sigmoid"
    max_length: int | None = None


class ImageSpec(Struct, frozen=True, kw_only=True):
    """The way in which a model's prompts contain images, found out by asking its own processor
    (``flavors.llm.images``).

    A chat template writes the token ``placeholder_id`` once for each image. In the prompt, the tokens of its layout
    take that token's place, among which each ``image_id`` stands for one vector of the image.

    Layout "fixed" is ``ids`` for every image. Layout "grid" (Idefics 3, SmolVLM) scales an image so that its longer
    side has at most ``longest_edge`` pixels, cuts it into tiles of ``tile`` pixels, and has for each tile ``ids`` after
    the tokens of its row and column, ``tile_heads[row][column]``; a row ends with ``row_end``, and the whole image
    follows as ``whole``. An image that fits into one tile is ``single``.
    """

    placeholder_id: int
    image_id: int
    layout: Literal["fixed", "grid"] = "fixed"
    ids: tuple[int, ...] = ()
    longest_edge: int = 0
    tile: int = 0
    tile_heads: tuple[tuple[tuple[int, ...], ...], ...] = ()
    row_end: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    single: tuple[int, ...] = ()


class DraftBundle(Struct, frozen=True, kw_only=True):
    """The small model that ``EngineSettings.draft_model`` names as ``uri``."""

    uri: str
    content_hash: str
    model_dir: str
    tokenizer_dir: str
    model_hashes: dict[str, str] = {}


class Bundle(Struct, frozen=True, kw_only=True):
    """Absolute paths of one model's parts.

    ``content_hash`` is SHA-256 over the manifest's file hashes. Equal hashes mean equal weights, wherever they are
    stored; processes use it to find an engine that already has them. ``default_adapter`` answers requests that name no
    adapter; None is the base. ``tool_formats`` says, by the name of the chat template, how calls are written; for other
    templates it is detected. ``draft`` is the draft model, if a setting names one. ``model_hashes`` has the SHA-256
    that the manifest gives for each file in ``model_dir``, by relative path; most loads compare only sizes, so a file
    may have another. It is empty where there is no manifest. ``weight_bytes`` are those of the files of weights in
    ``model_dir``, also where these were not fetched; 0 if that is not known. ``images`` is None for models that read
    only text.
    """

    content_hash: str
    tasks: tuple[Task, ...]
    model_dir: str
    tokenizer_dir: str
    adapters: dict[str, str] = {}
    chat_templates: dict[str, str] = {}
    tool_formats: dict[str, ToolFormat] = {}
    embedding: EmbeddingSpec | None = None
    cross_encoder: CrossEncoderSpec | None = None
    default_adapter: str | None = None
    draft: DraftBundle | None = None
    model_hashes: dict[str, str] = {}
    weight_bytes: int = 0
    images: ImageSpec | None = None


def draft_of(uri: str, found: Bundle) -> DraftBundle:
    """Return the model at ``uri`` as a draft model. Raises ``PackagingError`` if it does not generate text."""
    if "completions" not in found.tasks:
        raise PackagingError(f"draft_model: {uri} does {', '.join(found.tasks)}; expected a model that writes text")
    return DraftBundle(
        uri=uri,
        content_hash=found.content_hash,
        model_dir=found.model_dir,
        tokenizer_dir=found.tokenizer_dir,
        model_hashes=found.model_hashes,
    )
