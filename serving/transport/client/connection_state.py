"""The states of a client's connection to its engine, as a transition table. An event not listed for a state raises.

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
"""``disconnected``: there is no connection; the client looks for an engine while anything needs one. ``connecting``:
there is a connection and the client has sent its ``Hello``. ``connected``: the engine has answered. ``stalled``: the
engine made no progress and the client has left it; the next search names it, so that it is replaced."""

Happening: TypeAlias = Literal["found", "welcomed", "lost", "hung", "closed"]

TRANSITIONS: dict[State, dict[Happening, State]] = {
    "disconnected": {"found": "connecting", "closed": "closed"},
    "connecting": {"welcomed": "connected", "lost": "disconnected", "hung": "stalled", "closed": "closed"},
    "connected": {"lost": "disconnected", "hung": "stalled", "closed": "closed"},
    "stalled": {"found": "connecting", "closed": "closed"},
    "closed": {"closed": "closed"},
}


class IllegalTransition(AssertionError):
    """An event that cannot happen in a state: a bug in the loop."""


def after(state: State, happening: Happening) -> State:
    """Return the state that follows ``state``. Raises ``IllegalTransition``."""
    try:
        return TRANSITIONS[state][happening]
    except KeyError:
        raise IllegalTransition(f"{happening} while {state}") from None
