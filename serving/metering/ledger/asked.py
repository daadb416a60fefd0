"""A reservation on its way to be admitted, and what it counts against."""

from __future__ import annotations

from msgspec import Struct

from ..accounts.limits import SHADOW, Subject, limited_by
from ..accounts.windows import Amounts
from .lease import Reservation


class Asked(Struct, kw_only=True):
    """A reservation that asks to be admitted, and its row of the ledger; ``is_sent`` once the store may have it."""

    reservation: Reservation
    row: dict[str, object]
    is_sent: bool = False


def wanted_of(asked: Asked) -> Amounts:
    """Return the amounts that the reservation is charged."""
    return Amounts(
        input=asked.reservation.input_tokens,
        output=asked.reservation.max_output_tokens,
        queries=1,
        in_flight=1,
        money=int(str(asked.row["reserved_cost"])),
    )


def limited(reservation: Reservation) -> tuple[Subject, ...]:
    """Return the subjects of the limits that apply: none for a copy of a request."""
    if reservation.mode == SHADOW:
        return ()
    return limited_by(reservation.endpoint, reservation.key_id, reservation.tenant, reservation.limited_user)
