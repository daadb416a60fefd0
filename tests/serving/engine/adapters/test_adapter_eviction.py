"""Adapter eviction: fair between tenants, least recently used first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlflow_llm.serving.engine.adapters.eviction import choose, held_by


@dataclass(frozen=True)
class One:
    owner: str | None
    last_used: int
    num_bytes: int = 10


def evicted(adapters: list[One], owner: str | None, *, busy: tuple[int, ...] = (), extra: int = 10) -> list[int] | None:
    """Return the ages of the adapters evicted to free ``extra`` bytes for ``owner``, with a capacity of 40."""
    idle = [one for one in adapters if one.last_used not in busy]
    gone = choose(idle, held_by(adapters), owner, extra, room=40)
    return None if gone is None else [one.last_used for one in gone]


FULL = [One("a", 1), One("b", 2), One("b", 3), One("b", 4)]


@pytest.mark.parametrize(
    ("adapters", "owner", "busy", "gone"),
    [
        (FULL[1:], "a", (), []),  # there is room
        (FULL, "b", (), [2]),  # its own, older ones of others are not touched
        (FULL, "b", (2, 3), [4]),
        (FULL, "b", (2, 3, 4), None),  # it has more than its share: it waits for its own
        (FULL, "a", (), [2]),  # the owner with more than its share loses adapters
        (FULL, "a", (2, 3, 4), [1]),
        (FULL, "c", (), [2]),
        (FULL, None, (), [2]),  # named adapters are an owner too
        ([One(c, i) for i, c in enumerate("abcd")], "e", (), [0]),  # nobody has more: the longest unused
        ([One(c, i) for i, c in enumerate("abcd")], "e", (0, 1), [2]),
        ([One(c, i) for i, c in enumerate("abcd")], "e", (0, 1, 2, 3), None),
        ([One(None, i) for i in range(4)], None, (1,), [0]),  # a single owner may use everything
    ],
)
def test_eviction_order(adapters: list[One], owner: str | None, busy: tuple[int, ...], gone: list[int] | None) -> None:
    """Adapters of owners above their share go first; an owner above its share evicts nothing of owners within
    theirs."""
    assert evicted(adapters, owner, busy=busy) == gone


def test_evicts_only_as_many_as_needed() -> None:
    """Only as many adapters are evicted as needed, and none if that would not be enough."""
    assert evicted(FULL, "b", extra=30) == [2, 3, 4]
    assert evicted(FULL, "b", extra=31) is None
