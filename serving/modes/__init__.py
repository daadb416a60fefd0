"""How requests are admitted: pay-per-token or provisioned throughput."""

from __future__ import annotations

from .base import Admission, Mode, ModeProfile, Target
from .pay_per_token import PayPerToken
from .provisioned import Provisioned

__all__ = ["Admission", "Mode", "ModeProfile", "PayPerToken", "Provisioned", "Target"]
