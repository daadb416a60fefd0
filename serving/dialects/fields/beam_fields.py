"""Beam search with vLLM's fields: ``use_beam_search`` with ``best_of`` beams, of which the best ``n`` are returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import boolean, integer, number, one_of
from ...interface.request import MAX_CHOICES, EarlyStopping, RawBeams
from .fields import Field

EARLY: Mapping[Any, EarlyStopping] = {False: "heuristic", True: "first", "never": "never"}
_PENALTY = number(-10, 10)

BEAMS = (
    Field(
        name="use_beam_search",
        read=boolean,
        target="beams.use",
        description="beam search instead of sampling: follow best_of beams and return the best n texts",
        default=False,
    ),
    Field(
        name="best_of",
        read=integer(1, MAX_CHOICES),
        target="beams.best_of",
        description="number of beams (default n); without use_beam_search it must equal n",
    ),
    Field(
        name="length_penalty",
        read=_PENALTY,
        target="beams.length_penalty",
        description="beam search divides the log probability of a text by its length to this power; default 1",
    ),
    Field(
        name="early_stopping",
        read=one_of(False, True, "never"),
        target="beams.early_stopping",
        description="beam search ends when best_of texts are complete (true), when no better text is likely (false, "
        "the default), or when no better text is possible (never)",
    ),
    Field(
        name="num_beam_groups",
        read=integer(1, MAX_CHOICES),
        target="beams.num_groups",
        description="groups of beams that diversity_penalty makes differ; a divisor of best_of",
    ),
    Field(
        name="diversity_penalty",
        read=number(0, 100),
        target="beams.diversity_penalty",
        description="with groups: subtracted from the log probability of a token for each earlier group that chose it",
    ),
)

# sampling fields that a beam search does not use, with the values that have no effect
_DRAWS: Mapping[str, Any] = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "typical_p": 1}


def take_beams(found: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a beam search from ``found`` and return them."""
    return {key.removeprefix("beams."): found.pop(key) for key in list(found) if key.startswith("beams.")}


def check_nothing_drawn(sampling: Mapping[str, Any], body: Mapping[str, Any], search: str) -> None:
    """Raise ``InvalidField`` for fields that ask for sampling together with ``search``."""
    for name, nothing in _DRAWS.items():
        if sampling.get(name) not in (None, nothing):
            raise InvalidField(name, body[name], f"null or {nothing} with {search}: nothing is sampled")


def beams_of(found: dict[str, Any], sampling: Mapping[str, Any], body: Mapping[str, Any]) -> RawBeams | None:
    """Remove the fields of a beam search from ``found`` and return the search, or None if none is asked for.

    Raises ``InvalidField`` for search fields without a search, and for sampling fields with one.
    """
    given = take_beams(found)
    n = sampling.get("n") or 1
    best_of = given.pop("best_of", None)
    if not given.pop("use", False):
        if best_of is not None and best_of != n:
            raise InvalidField("best_of", best_of, f"n ({n}) unless use_beam_search is true: choices are not ranked")
        for field in BEAMS:
            if field.target is not None and field.target.removeprefix("beams.") in given:
                raise InvalidField(field.name, body[field.name], "null unless use_beam_search is true")
        return None
    check_nothing_drawn(sampling, body, "use_beam_search")
    width = best_of or n
    if width < n:
        raise InvalidField("best_of", best_of, f"at least n ({n})")
    groups = given.get("num_groups", 1)
    if width % groups:
        raise InvalidField("num_beam_groups", groups, f"a divisor of the number of beams, {width}")
    if given.get("diversity_penalty") and groups == 1:
        raise InvalidField("diversity_penalty", given["diversity_penalty"], "0 unless num_beam_groups is at least 2")
    if "early_stopping" in given:
        given["early_stopping"] = EARLY[given["early_stopping"]]
    return RawBeams(width=width, field="best_of" if best_of is not None else "n", **given)
