"""The states of a client's connection to its engine, as a transition table: an event that a state does not know raises.

::

                     found               welcomed
    disconnected ─────────────► connecting ──────► connected
      ▲   ▲                     │  │   ▲             │   │
      │   └──────── lost ───────┘  │   │ found       │   │
      │                       hung ▼   │             │   │
      │                            stalled ◄── hung ─┘   │
      └──────────────────────── lost ────────────────────┘

    closed: from every state
"""

from __future__ import annotations

from typing import Literal, TypeAlias

State: TypeAlias = Literal["disconnected", "connecting", "connected", "stalled", "closed"]
"""``disconnected``: there is no connection; it is looked for while anything needs it. ``connecting``: a connection is
made and the engine was greeted. ``connected``: it has answered. ``stalled``: the engine made no progress and was left;
the next search names it, so that it is replaced."""

Happening: TypeAlias = Literal["found", "welcomed", "lost", "hung", "closed"]

TRANSITIONS: dict[State, dict[Happening, State]] = {
    "disconnected": {"found": "connecting", "closed": "closed"},
    "connecting": {"welcomed": "connected", "lost": "disconnected", "hung": "stalled", "closed": "closed"},
    "connected": {"lost": "disconnected", "hung": "stalled", "closed": "closed"},
    "stalled": {"found": "connecting", "closed": "closed"},
    "closed": {"closed": "closed"},
}


class IllegalTransition(AssertionError):
    """An event that cannot happen in a state: a mistake of the loop's own."""


def after(state: State, happening: Happening) -> State:
    """The state that follows. Raises ``IllegalTransition``."""
    try:
        return TRANSITIONS[state][happening]
    except KeyError:
        raise IllegalTransition(f"{happening} while {state}") from None
