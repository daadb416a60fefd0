"""``/set``: a request field is checked when it is set, not when the next message is sent."""

from __future__ import annotations

import json
from typing import Any

import click

from ...dialects.fields.fields import nearest
from ...dialects.fields.tables import OPENAI
from ...interface.errors import InvalidField, shown
from ...system.escape import visible

_TABLE = OPENAI["chat"]
_CONVERSATION, _ONE, _UNSEEN = "is set by the conversation itself", "a turn has one reply", "nothing shows it here"
_NO_TOOLS = "nothing here runs tools"
NOT_HERE = {
    "messages": _CONVERSATION,
    "stream": _CONVERSATION,
    "stream_options": _CONVERSATION,
    "n": _ONE,
    "logprobs": _UNSEEN,
    "top_logprobs": _UNSEEN,
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "parallel_tool_calls": _NO_TOOLS,
}
SYSTEM, MODEL = "system", "model"
NAMES = (*sorted(name for name in _TABLE.fields if name not in NOT_HERE and name != MODEL), MODEL, SYSTEM)


def check_name(name: str) -> None:
    """Raise ``ClickException`` for a field that there is not, with the nearest name, or that has no place here."""
    if name in NAMES:
        return
    if name in NOT_HERE:
        raise click.ClickException(f"{name} {NOT_HERE[name]}")
    near = nearest(name, NAMES)
    raise click.ClickException(
        f"there is no field {visible(shown(name))}" + (f"; did you mean {near!r}?" if near else "")
    )


def read_value(name: str, text: str) -> Any:
    """Return the value of a field: JSON if that is accepted, else the text itself.

    ``null`` leaves the field to the model and the server. Raises ``ClickException``, saying what is allowed.
    """
    check_name(name)
    value = as_json(text)
    if value is None:
        return None
    try:
        _TABLE.fields[name].read(value, name)
        return value
    except InvalidField as error:
        refused = error
    try:
        _TABLE.fields[name].read(text, name)
        return text
    except InvalidField:
        raise click.ClickException(visible(str(refused))) from None


def as_json(text: str) -> Any:
    """Return ``text`` as JSON if it is JSON, else unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
