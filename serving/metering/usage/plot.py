"""Plot usage by day: tokens by kind, cost by tenant and by model. Needs matplotlib (``mlflow-llm[plot]``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..accounts.money import MILLION
from .usage import GroupBy, UsageFilter, UsageSource, UsageSum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Stacks = Mapping[str, Sequence[int]]
MAX_GROUPS_SHOWN = 9  # groups with a colour of their own; all others are combined
OTHERS = "others"


def plot_usage(usage: UsageSource, what: UsageFilter, path: str) -> None:
    """Plot daily tokens by kind and daily cost by tenant and by model to ``path`` (ending in .png, .svg or .pdf).

    Raises ``ModuleNotFoundError``, naming the extra, if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'mlflow-llm[plot]'") from error
    figure = Figure(figsize=(10, 10), layout="constrained")  # no pyplot: no display, no global state
    tokens, tenants, models = figure.subplots(3, 1, sharex=True)
    days, kinds = tokens_by_kind(usage, what)
    _stacked(tokens, days, kinds)
    tokens.set(title="tokens by kind", ylabel="tokens a day")
    unit = usage.currency() or "currency units"
    panels: tuple[tuple[Axes, GroupBy, str], ...] = (
        (tenants, "tenant", "cost by tenant"),
        (models, "entity", "cost by model"),
    )
    for axes, by, title in panels:
        days, stacks = cost_by_day(usage, what, by)
        _stacked(axes, days, stacks, unit=MILLION)
        axes.set(title=title, ylabel=f"{unit} a day")
    figure.savefig(path)


def _stacked(axes: Axes, days: Sequence[str], stacks: Stacks, unit: int = 1) -> None:
    bottom = [0] * len(days)
    for name, values in stacks.items():
        axes.bar(days, [value / unit for value in values], bottom=[below / unit for below in bottom], label=name)
        bottom = [below + more for below, more in zip(bottom, values, strict=True)]
    if stacks:
        axes.legend(fontsize="small")
    axes.tick_params(axis="x", rotation=45)


def tokens_by_kind(usage: UsageSource, what: UsageFilter) -> tuple[list[str], dict[str, list[int]]]:
    """Return (days in order, tokens of each day by kind): computed prompt tokens, cached prompt tokens, completion.

    They add up to the usage: the ledger's ``prompt_tokens`` includes cached ones.
    """
    sums = sorted(usage.sums(what, by=("day",)), key=lambda total: total.group)
    kinds = {
        "prompt": [total.prompt_tokens - total.cached_tokens for total in sums],
        "cached": [total.cached_tokens for total in sums],
        "completion": [total.completion_tokens for total in sums],
    }
    return [total.group[0] for total in sums], kinds


def cost_by_day(usage: UsageSource, what: UsageFilter, by: GroupBy) -> tuple[list[str], dict[str, list[int]]]:
    """Return (days in order, micro-units of each day by group), the most expensive first and small ones combined."""
    sums = usage.sums(what, by=("day", by))
    days = sorted({total.group[0] for total in sums})
    named = _largest(sums)
    stacks: dict[str, list[int]] = {name: [0] * len(days) for name in named}
    for total in sums:
        name = total.group[1] if total.group[1] in named else OTHERS
        stacks.setdefault(name, [0] * len(days))[days.index(total.group[0])] += total.cost
    return days, stacks


def _largest(sums: Sequence[UsageSum]) -> list[str]:
    cost: dict[str, int] = defaultdict(int)
    for total in sums:
        cost[total.group[1]] += total.cost
    ordered = sorted(cost, key=lambda name: (-cost[name], name))
    return ordered if len(ordered) <= MAX_GROUPS_SHOWN + 1 else ordered[:MAX_GROUPS_SHOWN]
