"""Shadow: copies of an endpoint's requests are counted in the ledger, at no price and against no limit."""

from __future__ import annotations

import msgspec

from ..interface.labels import NONE, Labels
from ..interface.request import ValidRequest
from ..metering.accounts.keys import Caller
from ..metering.accounts.limits import SHADOW
from ..metering.ledger.ledger import Ledger
from ..metering.proof.answers import Asked
from .base import Admission, ModeProfile, Target, reservation_of

PROFILE = ModeProfile(name=SHADOW, accepts_n=True, accepts_error_behavior=True)
CALLER = Caller(key_id=SHADOW, tenant=SHADOW)
"""The caller of copies in the ledger: whoever sent a request does not find its copy among its own."""


class Shadowing:
    """A mode that opens a row of the ledger for a copy: with its tokens, without a price, whoever the caller is."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def profile(self) -> ModeProfile:
        return PROFILE

    def admit(
        self,
        valid: ValidRequest,
        caller: Caller,
        target: Target,
        labels: Labels = NONE,
        asked: Asked | None = None,
    ) -> Admission:
        reservation = reservation_of(valid, CALLER, target, SHADOW, labels, asked=asked)
        free = msgspec.structs.replace(reservation, mode=SHADOW, background=False, pays_tokens=False)
        return Admission(self._ledger.reserve(free), valid)
