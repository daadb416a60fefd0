"""Plot usage over time: tokens by kind, and cost by tenant, endpoint, model or adapter. Needs matplotlib
(``mlflow-llm[plot]``)."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..accounts.money import MILLION, money
from .usage import GroupBy, UsageFilter, UsageSource, UsageSum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Stacks = Mapping[str, Sequence[int]]
MAX_GROUPS_SHOWN = 9  # groups with a colour of their own; all others are combined
MAX_DAYS_IN_HOURS = 3  # a span of so many days is shown by the hour
OTHERS, NONE = "others", "none"
TITLES = {"entity": "model", "key_id": "key"}
BAR_SHARE = 0.9  # width of a bar, as a share of its time


def plot_usage(
    usage: UsageSource, what: UsageFilter, path: str, groups: Sequence[GroupBy] = ("tenant", "entity")
) -> None:
    """Plot tokens by kind, and cost by each of ``groups``, over time to ``path`` (ending in .png, .svg or .pdf).

    The bars are hours if the usage spans at most ``MAX_DAYS_IN_HOURS`` days, else days. Groups of time are left out.
    Raises ``ModuleNotFoundError``, naming the extra, if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'mlflow-llm[plot]'") from error
    shown = [group for group in groups if group not in ("day", "hour")]
    unit, currency = unit_of(usage, what), usage.currency()
    figure = Figure(
        figsize=(10, 3.4 * (1 + len(shown))), layout="constrained"
    )  # no pyplot: no display, no global state
    tokens, *costs = figure.subplots(1 + len(shown), 1, sharex=True, squeeze=False)[:, 0]
    times, kinds = tokens_by_kind(usage, what, unit)
    _stacked(tokens, times, kinds, unit, {name: f"{name}: {sum(values):,}" for name, values in kinds.items()})
    tokens.set(title="tokens by kind", ylabel=f"tokens per {unit}")
    for axes, group in zip(costs, shown, strict=True):
        times, stacks = cost_over_time(usage, what, group, unit)
        labels = {name: f"{name}: {money(sum(values), currency)}" for name, values in stacks.items()}
        _stacked(axes, times, stacks, unit, labels, MILLION)
        axes.set(title=f"cost by {TITLES.get(group, group)}", ylabel=f"{currency or 'currency units'} per {unit}")
    figure.suptitle(totals(usage, what))
    figure.savefig(path)


def totals(usage: UsageSource, what: UsageFilter) -> str:
    """Return requests, tokens and cost in one line, with the days on which they were."""
    sums = usage.sums(what, by=("day",))
    if not sums:
        return "no usage"
    first, last = sums[0].group[0], sums[-1].group[0]
    days = first if first == last else f"{first} to {last}"
    requests = sum(one.requests for one in sums)
    tokens = sum(one.prompt_tokens + one.completion_tokens for one in sums)
    cost = money(sum(one.cost for one in sums), usage.currency())
    return f"{days} (UTC): {requests:,} requests, {tokens:,} tokens, {cost}"


def unit_of(usage: UsageSource, what: UsageFilter) -> GroupBy:
    """Return "hour" if the usage is on few days, else "day"."""
    days = [datetime.date.fromisoformat(one.group[0]) for one in usage.sums(what, by=("day",))]
    return "day" if days and (max(days) - min(days)).days >= MAX_DAYS_IN_HOURS else "hour"


def _stacked(
    axes: Axes, times: Sequence[str], stacks: Stacks, unit: GroupBy, labels: Mapping[str, str], scale: int = 1
) -> None:
    """Draw a bar for each time at its place on a time axis, so that a time without usage is a gap."""
    starts = [datetime.datetime.fromisoformat(time).replace(tzinfo=None) for time in times]
    width = datetime.timedelta(days=1) if unit == "day" else datetime.timedelta(hours=1)
    bottom = [0] * len(times)
    for name, values in stacks.items():
        heights, below = [value / scale for value in values], [value / scale for value in bottom]
        axes.bar(starts, heights, bottom=below, label=labels[name], width=width * BAR_SHARE, align="edge")
        bottom = [under + more for under, more in zip(bottom, values, strict=True)]
    if times:
        day = datetime.timedelta(days=1)
        first, last = (one.replace(hour=0) for one in (min(starts), max(starts)))
        axes.set_xlim(first, last + day)  # whole days: a single hour is no rectangle
        axes.legend(fontsize="small")
        axes.tick_params(axis="x", rotation=45)
    else:
        axes.text(0.5, 0.5, "no usage", ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])


def tokens_by_kind(
    usage: UsageSource, what: UsageFilter, unit: GroupBy = "day"
) -> tuple[list[str], dict[str, list[int]]]:
    """Return (times in order, tokens of each by kind): computed prompt tokens, cached prompt tokens, completion.

    They add up to the usage: the ledger's ``prompt_tokens`` includes cached ones.
    """
    sums = sorted(usage.sums(what, by=(unit,)), key=lambda total: total.group)
    kinds = {
        "prompt": [total.prompt_tokens - total.cached_tokens for total in sums],
        "cached": [total.cached_tokens for total in sums],
        "completion": [total.completion_tokens for total in sums],
    }
    return [total.group[0] for total in sums], kinds


def cost_over_time(
    usage: UsageSource, what: UsageFilter, by: GroupBy, unit: GroupBy = "day"
) -> tuple[list[str], dict[str, list[int]]]:
    """Return (times in order, micro-units of each by group), the most expensive first and small ones combined."""
    sums = usage.sums(what, by=(unit, by))
    times = sorted({total.group[0] for total in sums})
    named = _largest(sums)
    stacks: dict[str, list[int]] = {name or NONE: [0] * len(times) for name in named}
    for total in sums:
        name = (total.group[1] or NONE) if total.group[1] in named else OTHERS
        stacks.setdefault(name, [0] * len(times))[times.index(total.group[0])] += total.cost
    return times, stacks


def _largest(sums: Sequence[UsageSum]) -> list[str]:
    cost: dict[str, int] = defaultdict(int)
    for total in sums:
        cost[total.group[1]] += total.cost
    ordered = sorted(cost, key=lambda name: (-cost[name], name))
    return ordered if len(ordered) <= MAX_GROUPS_SHOWN + 1 else ordered[:MAX_GROUPS_SHOWN]
