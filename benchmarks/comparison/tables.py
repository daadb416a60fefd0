"""The results as Markdown: one section per run, one row per contender."""

from __future__ import annotations

from typing import Any

from report import table

BEGIN, END = "<!-- comparison: python benchmarks/compare.py --table -->", "<!-- end of comparison -->"


TRAFFIC = {
    "tokens/s": "tokens_per_second",
    "TTFT p50, ms": "ttft_p50",
    "TTFT p99": "ttft_p99",
    "TPOT p50": "tpot_p50",
    "gap p99": "gap_p99",
    "largest gap": "gap_max",
}


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def several(values: list[float | None], show: Any = number) -> str:
    """Return the values of several workloads in one cell, or an empty text if there are none."""
    return " / ".join(show(value) for value in values) if any(value is not None for value in values) else ""


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def texts(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    shown = f"{found['same']} of {found['of']}; {found['loss']}, {found['loss_of_reference']}"
    return f"**nonsense** ({shown})" if found["nonsense"] else shown


def markdown(result: dict[str, Any], run: str = "") -> str:
    """Return the machine and the tables of one run, which is called ``run``."""
    steady = [one for one in result["workloads"] if one["kind"] == "steady"]
    loops = [one["name"] for one in steady if one["name"].endswith("callers")]
    prompts = [one["name"] for one in steady if one["name"].startswith("prompt")]
    traffic = [one["name"] for one in result["workloads"] if one["kind"] == "traffic"]
    sizes = " / ".join(name.split()[0] for name in loops)
    lengths = " / ".join(f"{int(name.split()[-1]):,}" for name in prompts)
    loaded = [one["name"] for one in result["workloads"] if one["kind"] == "loaded"]
    rows, others, under, notes = [], [], [], []
    for one in result["rows"]:
        found, name = one["workloads"], one["contender"]
        if one.get("error"):
            notes.append(f"{name}: {one['error']}")
        if not found:
            continue

        def of(names: list[str], what: str, found: Any = found) -> list[float | None]:
            return [found.get(each, {}).get(what) for each in names]

        rows.append(
            {
                "": name,
                f"tokens/s at {sizes}": several(of(loops, "tokens_per_second")),
                "× ours int8": several(of(loops, "ratio"), times),
                "tokens per CPU second": several(of(loops, "tokens_per_cpu_second")),
                f"TTFT p50 at {sizes}, ms": several(of(loops, "ttft_p50")),
                f"prompt of {lengths}": several(of(prompts, "ttft_p50")),
                "equal tokens; loss, reference's": texts(one.get("texts")),
            }
        )
        if any(each in found for each in traffic):
            others.append({"": name, **{title: several(of(traffic, what)) for title, what in TRAFFIC.items()}})
        if loaded and loaded[-1] in found:
            able = found[loaded[0]]
            row = {"": name, "chats/s, 32 at once": times((able["requests"] - able["cut"]) / able["seconds"])}
            under.append(row | {title: number(found[loaded[-1]].get(what)) for title, what in TRAFFIC.items()})
    machine = result["machine"]
    refused = bool(result.get("without_amx"))
    had = [flag for flag in machine["flags"] if not (refused and flag.startswith("amx"))]
    flags = ", ".join(had) or "none of AVX2, AVX-512, VNNI, AMX"
    begin, end = (f"{value:.1f}" for value in result["load_average"])
    rounds = result["rounds"]
    title = f"**`{run}`**: " if run else ""
    said = [
        f"{title}{machine['cpu']} ({flags}), {machine['cores']} cores; {result['load']}; "
        f"{'one round' if rounds == 1 else f'medians of {rounds} rounds'}; load average {begin} before and {end} after."
    ]
    if refused:
        said.append("The CPU has AMX, which no contender was allowed to use (`--without-amx`).")
    parts = [" ".join(said), table(rows)] if rows else said
    if others:
        parts += ["Open loop: " + " / ".join(traffic) + ".", table(others)]
    if under:
        parts += [f"Open loop, {loaded[-1]}:", table(under)]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def insert(document: str, text: str) -> str:
    """Return ``document`` with ``text`` between the two marks. Raises ``ValueError`` if they are missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END} in it")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
