"""Pay-per-token: every token has a price, and requests are served as best effort."""

from __future__ import annotations

from ..interface.labels import NONE, Labels
from ..interface.request import ValidRequest
from ..metering.accounts.keys import Caller
from ..metering.ledger.ledger import Ledger
from ..metering.proof.answers import Asked
from .base import Admission, ModeProfile, Target, reservation_of

PROFILE = ModeProfile(name="pay_per_token", accepts_n=False, accepts_error_behavior=True)


class PayPerToken:
    """A mode that reserves a request's tokens in the ledger; each is paid for at its price."""

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
        reservation = reservation_of(valid, caller, target, PROFILE.name, labels, asked=asked)
        lease = self._ledger.reserve(reservation)
        return Admission(lease, valid)
