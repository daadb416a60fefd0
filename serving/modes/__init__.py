"""How requests are admitted: pay-per-token, provisioned throughput, or as copies that nobody pays for."""

from __future__ import annotations

from .base import Admission, Mode, ModeProfile, Target
from .pay_per_token import PayPerToken
from .provisioned import Provisioned
from .shadow import Shadowing

__all__ = ["Admission", "Mode", "ModeProfile", "PayPerToken", "Provisioned", "Shadowing", "Target"]
