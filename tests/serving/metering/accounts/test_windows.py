from __future__ import annotations

import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.metering.accounts import windows
from mlflow_llm.serving.metering.accounts.windows import Amounts, WindowState

SECONDS = {"itpm": 60, "otpm": 60, "qpm": 60, "qph": 3600}
SLOT = {"itpm": 1, "otpm": 1, "qpm": 1, "qph": 60}

steps = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 40)),
        st.tuples(st.just("wait"), st.integers(500, 4000)),
        st.tuples(st.just("ask"), st.integers(1, 60)),
        st.tuples(st.just("credit"), st.integers(0, 60)),
    ),
    max_size=60,
)


class Model:
    """A brute-force model: all charges as (second, amount), summed anew each time."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.charges: list[list[int]] = []

    def live(self, now: int) -> int:
        slot, before = SLOT[self.kind], windows.SLOTS_BEFORE
        return sum(amount for at, amount in self.charges if at // slot >= now // slot - before)

    def worst(self) -> int:
        """Return the largest sum in any window of exactly 60 s (3,600 s) that begins at a charge."""
        span = SECONDS[self.kind]
        return max(
            (sum(a for at, a in self.charges if start <= at <= start + span) for start, _ in self.charges), default=0
        )


def amounts(kind: str, value: int) -> Amounts:
    return Amounts(**{"itpm": {"input": value}, "otpm": {"output": value}}.get(kind, {"queries": value}))


@pytest.mark.parametrize("kind", ["itpm", "otpm", "qpm", "qph"])
@given(steps=steps, allowed=st.integers(1, 80))
@settings(max_examples=150, deadline=None)
def test_no_window_holds_more_than_its_limit(kind, steps, allowed):
    """Windows agree with a brute-force model: the same sums, never over the limit, and an exact wait."""
    state, model, now = WindowState(), Model(kind), 1_800_000_000
    for what, value in steps:
        if what == "wait":
            now += value
        elif what == "credit" and model.charges:
            at, amount = model.charges[-1]
            back = min(value, amount)
            model.charges[-1][1] -= back
            windows.charge(state, at, amounts(kind, -back))
        elif what == "ask":
            used = windows.used(state, kind, now)
            assert used == model.live(now)
            if used + value <= allowed:
                windows.charge(state, now, amounts(kind, value))
                model.charges.append([now, value])
            else:
                at = windows.free_at(state, kind, now, allowed=allowed, wanted=value)
                assert (at is None) == (value > allowed)
                if at is not None:
                    assert model.live(at) + value <= allowed < model.live(at - 1) + value
        state = windows.decode(windows.encode(state))
        assert model.worst() <= allowed
        assert all(len(slots) <= windows.SLOTS_BEFORE + 1 for slots in state.slots.values())


@given(st.datetimes(datetime.datetime(1971, 1, 1), datetime.datetime(2200, 1, 1)))
def test_months_are_the_calendars(when):
    """Month numbers and ends agree with the calendar (UTC)."""
    second = int(when.replace(tzinfo=datetime.UTC).timestamp())
    assert windows.month_of(second) == when.year * 12 + when.month - 1
    following = datetime.datetime(when.year + when.month // 12, when.month % 12 + 1, 1, tzinfo=datetime.UTC)
    assert windows.month_end(second) == following.timestamp()


def test_money_is_kept_by_period():
    """A late credit changes the period it was charged in, and only that."""
    state = WindowState()
    monday = 20_000 * windows.DAY_SECONDS
    windows.charge(state, monday, Amounts(money=100))
    windows.charge(state, monday + windows.DAY_SECONDS, Amounts(money=10))
    windows.charge(state, monday, Amounts(money=-40))
    now = monday + windows.DAY_SECONDS
    assert windows.used(state, "budget_day", now) == 10
    assert windows.used(state, "budget", now) == 70
    assert windows.used(state, "budget_day", now + windows.DAY_SECONDS) == 0
