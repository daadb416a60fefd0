"""Labels: what a caller says about a request for log, ledger and traces. They have no effect on the reply."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from .errors import InvalidField

TARGET = "labels."  # before the name of a label in the target of a request field; see ``take_labels``
TAGS = "tags."
MAX_USER = 256  # characters, as in Anthropic's API
MAX_REQUEST_ID = 256  # characters
MAX_TAGS = 16  # as in OpenAI's metadata, like the two below
MAX_TAG_NAME = 64  # characters
MAX_TAG_VALUE = 512  # characters
_SESSIONS = ("mlflow.trace.session", "session_id", "conversation_id")


class Labels(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The labels of one request. ``user`` is the caller's own id of its end user; ``client_request_id`` is the
    caller's own id of the request, which need not be unique. Each text is "" if it was not given."""

    user: str = ""
    client_request_id: str = ""
    tags: dict[str, str] = {}

    @property
    def session(self) -> str:
        """The conversation that the request belongs to, if a tag with a usual name says so."""
        return next((self.tags[name] for name in _SESSIONS if self.tags.get(name)), "")

    def over(self, defaults: Labels) -> Labels:
        """Return these labels, and those of ``defaults`` that are missing here, as far as there is room for tags."""
        missing = [(name, value) for name, value in defaults.tags.items() if name not in self.tags]
        return Labels(
            user=self.user or defaults.user,
            client_request_id=self.client_request_id or defaults.client_request_id,
            tags={**dict(missing[: MAX_TAGS - len(self.tags)]), **self.tags},
        )


NONE = Labels()


def take_labels(found: dict[str, Any]) -> None:
    """Replace the values in ``found`` whose target is a label by ``labels``, one ``Labels`` of them all.

    ``found`` has values by target, as ``Table.read`` returns them. The targets are ``labels.user``,
    ``labels.safety_identifier`` (the user, unless a user is given too), ``labels.client_request_id``, and
    ``labels.tags.<name of the field>`` for a field whose value has several tags. Raises ``InvalidField`` for two fields
    that disagree on a tag, and for too many tags of all fields together.
    """
    given = {key.removeprefix(TARGET): found.pop(key) for key in list(found) if key.startswith(TARGET)}
    if not given:
        return
    tags: dict[str, str] = {}
    for field in [name.removeprefix(TAGS) for name in given if name.startswith(TAGS)]:
        for name, value in given[TAGS + field].items():
            if tags.setdefault(name, value) != value:
                raise InvalidField(f"{field}.{name}", value, f"{tags[name]!r}, as another field says")
        if len(tags) > MAX_TAGS:
            raise InvalidField(field, given[TAGS + field], f"at most {MAX_TAGS} labels in all fields together")
    user, identifier = given.get("user", ""), given.get("safety_identifier", "")
    if user and identifier not in ("", user) and len(tags) < MAX_TAGS:
        tags.setdefault("safety_identifier", identifier)
    found["labels"] = Labels(user=user or identifier, client_request_id=given.get("client_request_id", ""), tags=tags)
