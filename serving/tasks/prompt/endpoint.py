"""The facts that ``prepare`` knows about the endpoint that received a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...interface.dialect_settings import DialectSettings
from ...interface.engine import EngineInfo
from ...interface.errors import InvalidField, NotFound
from ...interface.labels import NONE, Labels
from ...interface.request import MAX_MESSAGES, MAX_PROMPTS, RawRequest, Task
from ...model_files.model_uri import UNREGISTERED
from .text import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Defaults and limits of one endpoint.

    ``default_max_tokens`` None means up to the context length. ``strict_turns`` requires at most one system message, as
    the first one, then user and assistant in turn, ending with user (the Databricks document). With ``raw_prompts``
    False, completions go through the chat template unless ``use_raw_prompt`` is true. With ``index_by_prompt``, a
    choice's index is the index of its prompt, in dialects whose document says so. ``allow_n`` is for provisioned
    endpoints, ``allow_error_behavior`` for pay-per-token endpoints. ``max_copied_tokens`` bounds the prompts' tokens
    over all choices; ``max_reply_bytes`` bounds the parts of a reply that are not generated text (``reply_size``).
    ``timeout`` is how many seconds a request may take, None for no limit. ``dialects`` are settings that other servers
    have, including their length limits.
    """

    default_max_tokens: int | None = None
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    default_system_prompt: str | None = None
    strict_turns: bool = False
    raw_prompts: bool = True
    index_by_prompt: bool = False
    allow_n: bool = True
    allow_error_behavior: bool = True
    max_stop_strings: int = 64
    max_stop_chars: int = 32 * 2**10
    max_prompts: int = MAX_PROMPTS
    max_sequences: int = 4096
    max_copied_tokens: int = 2**22
    max_messages: int = MAX_MESSAGES
    max_reply_bytes: int | None = None
    timeout: float | None = None
    dialects: DialectSettings = field(default_factory=DialectSettings)


# The profiles that the Databricks document gives to its two kinds of endpoints.
DATABRICKS_PROVISIONED = Profile(strict_turns=True, raw_prompts=False, index_by_prompt=True, allow_error_behavior=False)
DATABRICKS_PAY_PER_TOKEN = Profile(strict_turns=True, raw_prompts=False, index_by_prompt=True, allow_n=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointView:
    """One served model as ``prepare`` sees it.

    ``names`` are the values that ``model`` may have besides ``name`` (served entities). None accepts any name: a model
    loaded in a notebook cannot know what its callers call it. A name after a colon is an adapter in both cases.
    ``adapters`` is called at each request, because adapters are loaded and unloaded. ``default_adapter`` answers
    requests that name no adapter. ``defaults`` returns the values of fields that a request does not set
    (``dialects.defaults``). ``version`` is the model's version in the registry.
    """

    name: str
    info: EngineInfo
    text: TextModel
    adapters: Callable[[], tuple[str, ...]] | tuple[str, ...] = ()
    default_adapter: str | None = None
    defaults: Callable[[Task], RawRequest | None] = lambda task: None
    profile: Profile = field(default_factory=Profile)
    names: tuple[str, ...] | None = ()
    version: str = UNREGISTERED

    def known_adapters(self) -> tuple[str, ...]:
        """Return the sorted names of the adapters that are loaded now."""
        return tuple(sorted(self.adapters() if callable(self.adapters) else self.adapters))

    @property
    def generates(self) -> bool:
        """Whether the model generates text."""
        return "completions" in self.info.tasks

    @property
    def context(self) -> int:
        """The maximum number of tokens of one sequence, prompt and completion together."""
        length = min(self.info.max_model_len, self.info.max_kv_tokens or self.info.max_model_len)
        return min(length, self.profile.dialects.maxSeqLen or length)

    @property
    def max_prompt_tokens(self) -> int:
        """The maximum number of tokens of a prompt."""
        return min(self.context, self.profile.dialects.maxInputTokenLen or self.context)

    def labels(self, raw: RawRequest) -> Labels:
        """Return the labels of ``raw``, with those of the model's own defaults that it lacks."""
        own = self.defaults(raw.task)
        given = raw.labels or NONE
        return given if own is None or own.labels is None else given.over(own.labels)

    def find_adapter(self, model: str | None, adapter: str | None) -> str | None:
        """Return the adapter that ``model`` ("endpoint:adapter") or ``adapter`` names, or the default one.

        None stands for the base model. Raises ``NotFound`` for an adapter or a model that does not exist,
        ``InvalidField`` if the two name different adapters.
        """
        found = self.named_adapter(model, adapter)
        if found is None:
            found = self.default_adapter
        if found is None:
            return None
        known = self.known_adapters()
        if found not in known:
            listed = ", ".join(known[:32]) or "none"
            raise NotFound(f"adapter: no adapter {found[:64]!r}; loaded: {listed}", param="adapter")
        return found

    def named_adapter(self, model: str | None, adapter: str | None) -> str | None:
        """Return the adapter that a request names, or None; it need not be loaded.

        Raises ``NotFound`` for a model that does not exist, ``InvalidField`` if the two name different adapters.
        """
        named = self._adapter_of(model)
        if named is not None and adapter is not None and named != adapter:
            raise InvalidField("adapter", adapter, f"{named!r} as in model, or only one of the two")
        return named if named is not None else adapter

    def _adapter_of(self, model: str | None) -> str | None:
        if model is None or model == self.name or model in (self.names or ()):
            return None
        name, colon, adapter = model.rpartition(":")
        if colon and (name == self.name or name in (self.names or ())):
            return adapter
        if self.names is None:
            return adapter if colon and "/" not in adapter else None  # models:/name/1 names no adapter
        raise NotFound(f"model: no model {model[:64]!r} here; this endpoint is {self.name!r}", param="model")
