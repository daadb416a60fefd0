"""The identity of a served model: which version of which registered model it is, and what it contains."""

from __future__ import annotations

from msgspec import Struct

from .model_uri import parse

SHORT_HASH_DIGITS = 12  # hexadecimal digits of a content hash that a person reads


class ModelVersion(Struct, frozen=True, kw_only=True):
    """A version of a model. ``name`` and ``version`` are those of the registry, "" for an unregistered model.

    ``content_hash`` is that of ``Bundle``: equal hashes mean equal files, whatever they are called. ``asked`` is what a
    command line asked for, such as ``models:/assistant@champion`` or a directory, if it cannot be the name of a served
    entity; else "".
    """

    name: str = ""
    version: str = ""
    content_hash: str = ""
    asked: str = ""

    @staticmethod
    def of(uri: str, content_hash: str) -> ModelVersion:
        """Return the identity of the model at ``uri``, which names a version if the model is registered."""
        named = parse(uri)
        if named is None or (version := named.version or named.alias) is None:
            return ModelVersion(content_hash=content_hash)
        return ModelVersion(name=named.name, version=version, content_hash=content_hash)

    @property
    def label(self) -> str:
        """``assistant/7``; "" for an unregistered model."""
        return f"{self.name}/{self.version}" if self.version else ""

    @property
    def short_hash(self) -> str:
        """The beginning of the content hash."""
        return self.content_hash[:SHORT_HASH_DIGITS]

    def __str__(self) -> str:
        return " ".join(filter(None, (self.label, self.short_hash)))


UNKNOWN = ModelVersion()
