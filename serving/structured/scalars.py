"""Combines the rules for numbers and strings, and limits the digits of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

from . import formats
from .document import SchemaNode
from .expression import whole_text_pattern
from .forms import INTEGERS, PARTS_DIGITS, WHOLE_DIGITS, Leaf
from .keywords import OF_TYPE, Keywords
from .values import type_of

MAX_LENGTH = 100_000
_MAX_COEFFICIENT = 10_000  # an automaton with so many states is built in 3 ms, one with 10,000,000 in 12 s


class Scalars:
    def __init__(self, keywords: Keywords) -> None:
        self.keywords = keywords

    def leaves(self, name: str, nodes: tuple[SchemaNode, ...]) -> list[Leaf]:
        """Return the leaf of a type under the rules of all nodes; [] if they contradict each other."""
        if name in ("null", "boolean"):
            return [Leaf(type=name)]
        rules = self._text(nodes) if name == "string" else self._number(nodes, integer=name == "integer")
        return [] if rules is None else [Leaf(type=name, rules=rules)]

    def is_enforced(self, node: SchemaNode) -> bool:
        """Return whether the node's ``format`` is more than an annotation."""
        return formats.enforced(self.keywords.get(node, "format") or "") is not None

    def among(self, listed: list[Any], nodes: tuple[SchemaNode, ...]) -> list[Any]:
        """Return those of the schema's listed values that its other rules allow."""
        for node in nodes:
            for value in listed:
                self._refuse_beside(node, type_of(value))
        low, high = self._bounds(nodes)
        steps = [Fraction(Decimal(repr(step))) for step in self._all(nodes, "multipleOf")]
        minimum, maximum = self._length(nodes)
        return [value for value in listed if _admits(value, low, high, steps) and _admits_text(value, minimum, maximum)]

    def _refuse_beside(self, node: SchemaNode, name: str) -> None:
        kept = OF_TYPE.get(name, set()) if name in ("array", "object") else {"pattern"} if name == "string" else set()
        for keyword in sorted(kept):
            if self.keywords.has(node, keyword):
                raise self.keywords.unsupported(node, keyword, "only those values in enum that it allows")
        if name == "string" and self.keywords.has(node, "format") and self.is_enforced(node):
            raise self.keywords.unsupported(node, "format", "only those values in enum that it allows")

    def _all(self, nodes: tuple[SchemaNode, ...], keyword: str) -> list[Any]:
        return [value for node in nodes if (value := self.keywords.get(node, keyword)) is not None]

    # ---- numbers ----

    def _bounds(self, nodes: tuple[SchemaNode, ...]) -> tuple[tuple[Any, bool], tuple[Any, bool]]:
        """Return the highest minimum and the lowest maximum, each with whether the bound itself is excluded."""
        low: tuple[Any, bool] = (-math.inf, False)
        high: tuple[Any, bool] = (math.inf, False)
        for node in nodes:
            minimum, maximum = self.keywords.get(node, "minimum"), self.keywords.get(node, "maximum")
            above, below = self.keywords.get(node, "exclusiveMinimum"), self.keywords.get(node, "exclusiveMaximum")
            for bound, left_out in _ends(minimum, above):
                low = max(low, (bound, left_out))
            for bound, left_out in _ends(maximum, below):
                high = min(high, (bound, left_out), key=lambda end: (end[0], not end[1]))
        return low, high

    def _number(self, nodes: tuple[SchemaNode, ...], *, integer: bool) -> dict[str, Any] | None:
        low, high = self._bounds(nodes)
        step = self._step(nodes, integer=integer)
        return self._integer(nodes, low, high, step) if integer else self._decimal(nodes, low, high, step)

    def _integer(
        self, nodes: tuple[SchemaNode, ...], low: tuple[Any, bool], high: tuple[Any, bool], step: Fraction | None
    ) -> dict[str, Any] | None:
        if low[0] > INTEGERS or high[0] < -INTEGERS:
            self._refuse_bounds(nodes, f"bounds within ±{INTEGERS:,}")
        minimum = -INTEGERS if low[0] < -INTEGERS else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
        maximum = INTEGERS if high[0] > INTEGERS else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
        if minimum > maximum:
            return None
        if int(float(minimum)) != minimum or int(float(maximum)) != maximum:
            self._refuse_bounds(nodes, "bounds that a double holds")
        if step is not None and -(-minimum // step) * step > maximum:
            return None
        rules: dict[str, Any] = {"minimum": minimum, "maximum": maximum}
        return rules if step in (None, 1) else {**rules, "multipleOf": int(step or 1)}

    def _decimal(
        self, nodes: tuple[SchemaNode, ...], low: tuple[Any, bool], high: tuple[Any, bool], step: Fraction | None
    ) -> dict[str, Any] | None:
        if low[0] > WHOLE_DIGITS or high[0] < -WHOLE_DIGITS:
            self._refuse_bounds(nodes, f"bounds within ±{WHOLE_DIGITS:,}")
        low = max(low, (-WHOLE_DIGITS, False))
        high = min(high, (WHOLE_DIGITS, False), key=lambda end: (end[0], not end[1]))
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
            return None
        if any(isinstance(end, int) and int(float(end)) != end for end, _ in (low, high)):
            self._refuse_bounds(nodes, "bounds that a double holds")
        rules: dict[str, Any] = {
            "exclusiveMinimum" if low[1] else "minimum": low[0],
            "exclusiveMaximum" if high[1] else "maximum": high[0],
        }
        if step is not None:
            multiple = -(-Fraction(low[0]) // step) * step
            if multiple > high[0] or (multiple == low[0] and low[1] and multiple + step > high[0]):
                return None
            return {**rules, "multipleOf": int(step) if step.denominator == 1 else float(step)}
        return {**rules, "multipleOf": 10.0 ** -_places(low, high)}

    def _step(self, nodes: tuple[SchemaNode, ...], *, integer: bool) -> Fraction | None:
        """Return the least common multiple of all ``multipleOf``."""
        steps = [Fraction(Decimal(repr(step))) for step in self._all(nodes, "multipleOf")]
        if not steps:
            return None
        step = Fraction(1) if integer else steps[0]
        for other in steps:
            step = Fraction(math.lcm(step.numerator * other.denominator, other.numerator * step.denominator),
                            step.denominator * other.denominator)  # fmt: skip
        if not _is_read_exactly(step):
            node = next(node for node in nodes if self.keywords.has(node, "multipleOf"))
            allowed = f"a multiple of a power of ten by at most {_MAX_COEFFICIENT:,}"
            raise self.keywords.document.error(f"{node.pointer}/multipleOf", node.schema["multipleOf"], allowed)
        return step

    def _refuse_bounds(self, nodes: tuple[SchemaNode, ...], allowed: str) -> NoReturn:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        node, name = next((node, name) for node in nodes for name in names if self.keywords.has(node, name))
        raise self.keywords.document.error(f"{node.pointer}/{name}", node.schema[name], allowed)

    # ---- strings ----

    def _length(self, nodes: tuple[SchemaNode, ...]) -> tuple[int, float]:
        minimum = max(self._all(nodes, "minLength"), default=0)
        return int(minimum), min(self._all(nodes, "maxLength"), default=math.inf)

    def _text(self, nodes: tuple[SchemaNode, ...]) -> dict[str, Any] | None:
        minimum, maximum = self._length(nodes)
        if minimum > maximum:
            return None
        if minimum > MAX_LENGTH:
            node = next(node for node in nodes if self.keywords.get(node, "minLength") == minimum)
            raise self.keywords.document.error(f"{node.pointer}/minLength", minimum, f"at most {MAX_LENGTH:,}")
        rules: dict[str, Any] = {"minLength": minimum} if minimum else {}
        if maximum < math.inf:
            rules["maxLength"] = int(min(maximum, MAX_LENGTH))
        shapes = [
            {"pattern": whole_text_pattern(pattern, self._refusal(node))}
            for node in nodes
            if (pattern := self.keywords.get(node, "pattern")) is not None
        ]
        named = dict.fromkeys(self._all(nodes, "format"))
        shapes += [shape for name in named if (shape := formats.enforced(name)) is not None]
        if len(shapes) == 1:
            return {**rules, **shapes[0]}
        return {**rules, "allOf": [{"type": "string", **shape} for shape in shapes]} if shapes else rules

    def _refusal(self, node: SchemaNode) -> Callable[[str], NoReturn]:
        def refuse(allowed: str) -> NoReturn:
            raise self.keywords.document.error(f"{node.pointer}/pattern", node.schema["pattern"], allowed)

        return refuse


def _ends(bound: Any, exclusive: Any) -> list[tuple[Any, bool]]:
    """Return the bounds of one side. Draft 4 has a boolean next to the bound, later drafts a separate bound."""
    if isinstance(exclusive, bool):
        return [] if bound is None else [(bound, exclusive)]
    ends = [] if bound is None else [(bound, False)]
    return ends if exclusive is None else [*ends, (exclusive, True)]


def _places(low: tuple[Any, bool], high: tuple[Any, bool]) -> int:
    """Return how many decimal places a number may have, so that doubles can tell it from an excluded bound."""
    open_ends = [abs(end) for end, left_out in (low, high) if left_out]
    whole = len(str(int(max(open_ends, default=0))))
    return PARTS_DIGITS if whole <= 5 else max(1, 15 - whole)


def _is_read_exactly(step: Fraction) -> bool:
    """Return whether llguidance reads ``step`` exactly: it multiplies the double by ten until it is a whole number."""
    value, power = float(step), 0
    while value % 1 and power <= PARTS_DIGITS:
        value, power = value * 10, power + 1
    return 0 < value <= _MAX_COEFFICIENT and not value % 1 and Fraction(int(value), 10**power) == step


def _admits(value: Any, low: tuple[Any, bool], high: tuple[Any, bool], steps: list[Fraction]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if value < low[0] or value > high[0] or (value == low[0] and low[1]) or (value == high[0] and high[1]):
        return False
    return all(Fraction(Decimal(repr(value))) % step == 0 for step in steps)


def _admits_text(value: Any, minimum: int, maximum: float) -> bool:
    return not isinstance(value, str) or minimum <= len(value) <= maximum
