"""The files of one packaged model, as an engine and a tokenizer need them.

Layout under the root of a saved model (written by ``flavors.llm``, everything relative)::

    model/                      config.json, *.safetensors (sentence-transformers: also modules.json, 1_Pooling/ …),
                                as they came or with quantised linears (``engine/stored_weights.py``)
    tokenizer/                  what AutoTokenizer.from_pretrained reads
    adapters/<name>/            adapter_config.json, adapter_model.safetensors (peft's layout)
    chat_template.jinja         the default template
    chat_templates/<name>.jinja further named templates
    manifest.json               format version, tasks, base, sizes and SHA-256 of every file above

A version that holds only an adapter has no ``model/``; its manifest names the base by URI and content hash, and the
flavor joins the two into one ``Bundle``.
"""

from __future__ import annotations

from msgspec import Struct

from .errors import PackagingError
from .request import Activation, Task
from .tool_calls.formats import ToolFormat


class EmbeddingSpec(Struct, frozen=True, kw_only=True):
    """How token vectors become one vector, and what is put before the text."""

    pooling: str = "mean"  # mean | cls | lasttoken | max | mean_sqrt_len_tokens | weightedmean
    normalize: bool = True
    max_length: int | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


class CrossEncoderSpec(Struct, frozen=True, kw_only=True):
    """What is made of the one number that a cross-encoder gives a pair, and the most tokens that a pair may have."""

    activation: Activation = "sigmoid"
    max_length: int | None = None


class DraftBundle(Struct, frozen=True, kw_only=True):
    """The small model of ``EngineSettings.draft_model``; ``uri`` is what it is called there."""

    uri: str
    content_hash: str
    model_dir: str
    tokenizer_dir: str


class Bundle(Struct, frozen=True, kw_only=True):
    """Absolute paths of one model's parts. ``content_hash`` is SHA-256 over the manifest's file hashes: same hash,
    same weights, wherever they lie, which is how processes find an engine that already has them.
    ``default_adapter`` answers requests that name none; None is the base. ``tool_formats``: how calls are written after
    each chat template, by its name; what is not there is detected. ``draft`` is the model whose drafts an engine takes,
    where a setting names one."""

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


def draft_of(uri: str, found: Bundle) -> DraftBundle:
    """The model at ``uri`` as a draft model. Raises ``PackagingError`` for one that writes no text."""
    if "completions" not in found.tasks:
        raise PackagingError(f"draft_model: {uri} does {', '.join(found.tasks)}; expected a model that writes text")
    return DraftBundle(
        uri=uri, content_hash=found.content_hash, model_dir=found.model_dir, tokenizer_dir=found.tokenizer_dir
    )
