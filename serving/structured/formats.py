"""The string formats that are enforced; every other ``format`` is only an annotation, as in JSON Schema.

Dates and times must exist and be accepted by parsers: years from 0001, February 29 only in leap years, seconds up to
59, at most six digits of a fraction. The formats in ``NAMED`` are llguidance's own.
"""

from __future__ import annotations

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_NUMBER = "[0-9]{1,6}"
_TIME_SPAN = f"T(?:{_NUMBER}H(?:{_NUMBER}M)?(?:{_NUMBER}S)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_DAYS = f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_DURATION = f"P(?:{_DAYS}(?:{_TIME_SPAN})?|{_TIME_SPAN}|{_NUMBER}W)"
_UUID = "[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    **{f"uuid{version}": _UUID.format(version=version) for version in (1, 3, 4, 5, 6, 7, 8)},  # pydantic's
}
NAMED = {"email", "hostname", "ipv4", "ipv6", "uuid", "uri"}


def enforced(name: str) -> dict[str, str] | None:
    """Return the keywords that enforce a format in a schema; None if it is only an annotation."""
    if name in PATTERNS:
        return {"pattern": f"^(?:{PATTERNS[name]})$"}
    return {"format": name} if name in NAMED else None
