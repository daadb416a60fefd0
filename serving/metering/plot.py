"""A picture of usage by day, tenant and model. Needs matplotlib (``pip install mlflow-llm[plot]``)."""

from __future__ import annotations

from collections import defaultdict

from .usage import GroupBy, Usage, UsageFilter

_PANELS: tuple[GroupBy, ...] = ("tenant", "entity")


def plot_usage(usage: Usage, what: UsageFilter, path: str) -> None:
    """Write tokens a day, stacked by tenant and by model, to ``path`` (its ending chooses PNG, SVG or PDF).

    Raises ``ModuleNotFoundError`` naming the extra where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'mlflow-llm[plot]'") from error
    figure = Figure(figsize=(10, 7), layout="constrained")  # no pyplot: no display, no global state
    for axes, by in zip(figure.subplots(len(_PANELS), 1, sharex=True), _PANELS, strict=True):
        days, stacks = tokens_by_day(usage, what, by)
        bottom = [0] * len(days)
        for name, tokens in stacks.items():
            axes.bar(days, tokens, bottom=bottom, label=name)
            bottom = [below + more for below, more in zip(bottom, tokens, strict=True)]
        axes.set_ylabel("tokens a day")
        axes.set_title("by " + ("model" if by == "entity" else by))
        if stacks:
            axes.legend(fontsize="small")
        axes.tick_params(axis="x", rotation=45)
    figure.savefig(path)


def tokens_by_day(usage: Usage, what: UsageFilter, by: GroupBy) -> tuple[list[str], dict[str, list[int]]]:
    """(days in order, prompt + completion tokens of each day by group)."""
    sums = usage.sums(what, by=("day", by))
    days = sorted({total.group[0] for total in sums})
    stacks: dict[str, list[int]] = defaultdict(lambda: [0] * len(days))
    for total in sums:
        stacks[total.group[1]][days.index(total.group[0])] += total.prompt_tokens + total.completion_tokens
    return days, dict(stacks)
