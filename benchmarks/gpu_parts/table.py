"""One table of all records: tokens per second and milliseconds, and what each stands beside."""

from __future__ import annotations

from typing import Any

from .floor import floor_seconds, prefill_operations
from .plan import INSIDE, SERVER, Plan, Record

HEADS = ("part", "what", "tokens/s", "ms", "beside")
Row = tuple[str, str, str, str, str]


class Table:
    """The rows of a run. ``config`` is the model's; speeds of the device are among the records."""

    def __init__(self, plan: Plan, config: Any, records: list[Record]) -> None:
        self._plan, self._config, self._records = plan, config, records
        device: Record = next((record for record in records if record["part"] == "device"), {})
        self._copies, self._matrix = device.get("copies"), device.get("matrix")
        self._steps = {(r["by"], r["count"]): r["seconds"] for r in self._of("decode")}

    def _of(self, *parts: str) -> list[Record]:
        return [r for r in self._records if r["part"] in parts and not {"cut", "error"} & r.keys()]

    def rows(self) -> list[Row]:
        return [*self._tests(), *self._families(), *self._prefill(), *self._decode(), *self._features(), *self._http(),
                *self._peers()]  # fmt: skip

    def _tests(self) -> list[Row]:
        found = [record for record in self._records if record["part"] == "tests" and "counts" in record]
        told = [(", ".join(f"{n} {kind}" for kind, n in r["counts"].items()), r.get("cut", "")) for r in found]
        return [("tests", counts or "none", "", "", cut) for counts, cut in told]

    def _families(self) -> list[Row]:
        found = [record for record in self._records if record["part"] == "families" and "family" in record]
        wrong = [record["family"] for record in found if not record["equal"]]
        said = f"not: {', '.join(wrong)}" if wrong else ""
        what = f"{len(found) - len(wrong)} of {len(found)} equal generate()"
        return [("families", what, "", "", said)] if found else []

    def _prefill(self) -> list[Row]:
        rows = []
        for r in self._of("prefill"):
            tokens = r["count"] * r["length"]
            beside = ""
            if self._matrix:
                share = prefill_operations(self._config, r["count"], r["length"]) / r["seconds"] / self._matrix
                beside = f"{share:.2f} of the matrix rate"
            what = f"{r['count']} × {r['length']:,}{_of_other(r['by'])}"
            rows.append(row("prefill", what, tokens / r["seconds"], r["seconds"], beside))
        return rows

    def _decode(self) -> list[Row]:
        rows = []
        for r in self._of("decode"):
            floor, ours = self._floor(r["count"], r["by"]), self._steps.get(("ours", r["count"]))
            said = [f"{r['seconds'] / floor:.2f} × the floor"] if floor else []
            if ours and r["by"] != "ours":
                said.append(f"{ours / r['seconds']:.2f} of bfloat16" if r["by"] == "fp8" else _faster(r, ours))
            what = f"{r['count']}{_of_other(r['by'])}"
            rows.append(row("decode", what, r["count"] / r["seconds"], r["seconds"], "; ".join(said)))
        return rows

    def _floor(self, count: int, by: str) -> float | None:
        if not self._copies:
            return None
        length, itemsize = self._plan.prompt + self._plan.new / 2, 4 if self._plan.on_cpu else 2
        return floor_seconds(self._config, itemsize, count, length, self._copies, 1 if by == "fp8" else None)

    def _features(self) -> list[Row]:
        found = self._of("features")
        plain = next((r["seconds"] for r in found if r["feature"] == "plain"), None)
        rows = []
        for r in found:
            beside = f"{r['seconds'] / plain:.2f} × plain" if plain and r["feature"] != "plain" else ""
            what = f"{r['count']}, {r['feature']}"
            rows.append(row("features", what, r["count"] / r["seconds"], r["seconds"], beside))
        return rows

    def _http(self) -> list[Row]:
        found = [record for record in self._of("http") if "rate" in record]
        inside = {r["count"]: r["rate"] for r in found if r["by"] == INSIDE}
        rows: list[Row] = []
        for r in found:
            beside = ""
            if r["by"] == SERVER and r["count"] in inside:
                beside = f"{r['rate'] / inside[r['count']]:.2f} of in process"
            rows.append(("http", f"{r['count']}, {r['by']}", f"{r['rate']:,.0f}", "", beside))
        return rows

    def _peers(self) -> list[Row]:
        rows = []
        for r in self._of("peers"):
            ours = self._steps.get(("ours", r["count"]))
            beside = _faster(r, ours) if ours else ""
            rows.append(row("peers", f"{r['count']}, {r['by']}", r["count"] / r["seconds"], r["seconds"], beside))
        return rows

    def text(self) -> str:
        lines = [f"| {' | '.join(HEADS)} |", "|---|---|---:|---:|---|"]
        return "\n".join([*lines, *map(line, self.rows())])


def line(row: Row) -> str:
    return f"| {' | '.join(row)} |"


def row(part: str, what: str, rate: float, seconds: float, beside: str) -> Row:
    return part, what, f"{rate:,.0f}", f"{seconds * 1e3:,.{3 if seconds < 0.1 else 1}f}", beside


def _of_other(by: str) -> str:
    return "" if by == "ours" else f", {by}"


def _faster(record: Record, ours: float) -> str:
    return f"ours is {record['seconds'] / ours:.2f} × as fast"


def notes(records: list[Record]) -> list[str]:
    """Return a line for each engine, and for each part that was cut, failed, or runs by torch."""
    lines = []
    for r in records:
        if r["part"] == "engine":
            graphs, ahead = r["graphs"] or "none", "yes" if r["ahead"] else "no"
            lines.append(
                f"- {r['by']}: attention: {r['attention']}; prefill: {r['prefill']}; graphs: {graphs}; launched ahead: "
                f"{ahead}; start: {r['start_seconds']:.1f} s"
            )
            lines += [f"    - {reason}" for reason in r["reasons"]]
        elif r["part"] == "families" and "family" in r:
            told = [r["error"]] if "error" in r else r.get("reasons", [])
            lines += [f"- {r['family']}: {reason}" for reason in told]
        elif "cut" in r or "error" in r:
            name = f"{r['part']}, {r['feature']}" if "feature" in r else r["part"]
            lines.append(f"- {name}: {'cut: ' + r['cut'] if 'cut' in r else r['error']}")
        for test in r.get("failed", ()) if r["part"] == "tests" else ():
            lines.append(f"    - failed: {test}")
    return lines


def kernels(records: list[Record], longest: int = 24) -> str:
    """Return the tables by kernel."""
    lines: list[str] = []
    for r in records:
        if r["part"] != "profile" or "kernels" not in r:
            continue
        lines += ["", f"{r['what']}: {r['wall_ms']:.3f} ms, of which {r['device_ms']:.3f} ms in kernels", ""]
        lines += ["| ms | share | calls | kernel |", "|---:|---:|---:|---|"]
        for one in r["kernels"][:longest]:
            share = one["ms"] / r["device_ms"] if r["device_ms"] else 0
            name = one["kernel"][:110].replace("|", "\\|")
            lines.append(f"| {one['ms']:.3f} | {share:.1%} | {one['calls']:.1f} | {name} |")
    return "\n".join(lines)
