"""Proves that no value matches two forms at once, in which case ``oneOf`` is the same as ``anyOf``.

A form may allow less than its schema does (``conjunction``), so only the schema's own statements count as a proof:
types that the caller named, listed values, and properties that have no value in common.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from . import values
from .forms import Form, Leaf

MAX_LEAVES = 300  # each is compared with each other
MAX_DEPTH = 3  # levels of nested objects that are compared


def prove_disjoint(forms: list[Form], tag: str | None) -> list[Form] | None:
    """Return the forms such that none shares a value with another; None if that cannot be proved.

    An optional property that distinguishes two forms becomes required. ``tag`` is the property to check first.
    """
    leaves = [list(form.leaves) for form in forms]
    if sum(map(len, leaves)) > MAX_LEAVES:
        return None
    for ours, others in combinations(range(len(forms)), 2):
        for i in range(len(leaves[ours])):
            for j in range(len(leaves[others])):
                pair = _apart(leaves[ours][i], leaves[others][j], tag)
                if pair is None:
                    return None
                leaves[ours][i], leaves[others][j] = pair
    return [Form(each) for each in leaves]


def _apart(ours: Leaf, other: Leaf, tag: str | None) -> tuple[Leaf, Leaf] | None:
    if ours.type == other.type == "object":
        return _objects_apart(ours, other, tag)
    return (ours, other) if _share_nothing(ours, other) else None


def _share_nothing(ours: Leaf, other: Leaf, depth: int = 0) -> bool:
    if ours.type == other.type == "object":
        if depth >= MAX_DEPTH:
            return False
        pairs = ((ours, other), (other, ours))
        return all(_tells(one, another, None, depth + 1, required=True) is not None for one, another in pairs)
    if "any" in (ours.type, other.type):
        return False
    if ours.type == other.type == "values":
        return not {values.key(value) for value in ours.values} & {values.key(value) for value in other.values}
    if ours.inferred or other.inferred:
        return False  # a schema without a named type allows every value of the other types
    if ours.type == "values":
        return not any(values.is_of(value, (other.type,)) for value in ours.values)
    if other.type == "values":
        return _share_nothing(other, ours, depth)
    return ours.type != other.type and {ours.type, other.type} != {"integer", "number"}


def _objects_apart(ours: Leaf, other: Leaf, tag: str | None) -> tuple[Leaf, Leaf] | None:
    mine, theirs = _tells(ours, other, tag, 0), _tells(other, ours, tag, 0)
    if mine is None or theirs is None:
        return None
    return _requiring(ours, mine), _requiring(other, theirs)


def _tells(ours: Leaf, other: Leaf, tag: str | None, depth: int, *, required: bool = False) -> str | None:
    """Return a property that, if present, keeps every value of ``ours`` out of the schema of ``other``.

    None if there is none; "" if the values are excluded without it. Properties that ``ours`` requires are checked
    first, and only those if ``required``.
    """
    may_tell = [*ours.required] if required else [*ours.required, *ours.properties]
    if tag in may_tell and _keeps_out(ours, other, tag, depth):
        return tag
    if any(not ours.may_have(name) for name in other.demanded):
        return ""
    return next((name for name in may_tell if _keeps_out(ours, other, name, depth)), None)


def _keeps_out(ours: Leaf, other: Leaf, name: str, depth: int) -> bool:
    if not ours.properties.get(name):
        return False
    if name not in other.properties:
        return other.sealed
    return all(
        _share_nothing(mine, theirs, depth)
        for mine in ours.properties[name].leaves
        for theirs in other.properties[name].leaves
    )


def _requiring(leaf: Leaf, name: str) -> Leaf:
    return leaf if not name or name in leaf.required else replace(leaf, required=[*leaf.required, name])
