"""Settings of the servers whose dialects this server speaks, under their original names."""
# ruff: noqa: N815

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from .errors import InvalidField
from .settings import Count
from .validated_struct import Checked

Word = Annotated[str, Meta(min_length=1, max_length=64, description="a word: 'vllm', or another for OpenAI's own form")]
Directory = Annotated[str, Meta(pattern=r"^/[^\x00]{0,1000}$", description="the absolute path of a directory")]
Domain = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,253}$")]
Domains = Annotated[tuple[Domain, ...], Meta(description="a list of hosts' names")]
BATCH = "max_num_batched_tokens"  # what the engine calls ``maxPrefillTokens``


class DialectSettings(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an endpoint, or of a server for endpoints that do not set them; None is the default.

    Attributes:
        openAiSupport: "vllm" gives ``/v1/chat/completions`` MindIE's format; with any other word it keeps OpenAI's.
        fullTextEnabled: each chunk of a stream has the whole text so far.
        maxIterTimes: the most tokens of a reply.
        maxSeqLen: the most tokens of prompt and reply together.
        maxInputTokenLen: the most tokens of a prompt.
        maxPrefillTokens: the most tokens in one step; the engine's ``max_num_batched_tokens``.
        generateProfile: whether the details of Triton's ``generate`` have times ("current") or null, as in MindIE's
            document ("seed").
        generateEndText: put ``</s>`` into the last event of ``generate_stream``.
        allowedLocalMediaPath: directory below which files that messages name may be read.
        allowedMediaDomains: hosts from which URLs that messages name may be fetched.
        embeddingTokenIds: take any token ids as inputs of embeddings, also without the model's special tokens: all
            callers use the model's own tokenizer.
    """

    openAiSupport: Word | None = None
    fullTextEnabled: bool | None = None
    maxIterTimes: Count | None = None
    maxSeqLen: Count | None = None
    maxInputTokenLen: Count | None = None
    maxPrefillTokens: Count | None = None
    generateProfile: Literal["seed", "current"] | None = None
    generateEndText: bool | None = None
    allowedLocalMediaPath: Directory | None = None
    allowedMediaDomains: Domains | None = None
    embeddingTokenIds: bool | None = None

    def check(self, parent: str = "") -> None:
        """Raise ``InvalidField`` for lengths that contradict each other."""
        before, length = f"{parent}." if parent else "", self.maxSeqLen
        for name in ("maxInputTokenLen", "maxIterTimes") if length is not None else ():
            if (value := getattr(self, name)) is not None and value >= length:
                allowed = f"less than maxSeqLen, {length}, which is of prompt and reply together"
                raise InvalidField(before + name, value, allowed)

    def over(self, other: Self) -> Self:
        """Return these settings, with those of ``other`` for the ones that are None here."""
        return type(self)(**(other.given() | self.given()))

    def given(self) -> dict[str, Any]:
        """Return the settings that are not None."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @property
    def speaks_mindie(self) -> bool:
        """Whether OpenAI's chat route speaks MindIE's dialect."""
        return self.openAiSupport == "vllm"


NAMES = DialectSettings.__struct_fields__


def batched(engine: Mapping[str, Any], dialects: DialectSettings, parent: str = "") -> dict[str, Any]:
    """Add ``maxPrefillTokens`` to the engine settings. Raises ``InvalidField`` if they have a different number;
    ``parent`` is the path of ``dialects``, for errors."""
    tokens = dialects.maxPrefillTokens
    if tokens is None:
        return dict(engine)
    if (engine.get(BATCH) or tokens) != tokens:
        field = f"{parent}.maxPrefillTokens" if parent else "maxPrefillTokens"
        raise InvalidField(field, tokens, f"the engine's {BATCH}, {engine[BATCH]}, or only one of the two")
    return {**engine, BATCH: tokens}
