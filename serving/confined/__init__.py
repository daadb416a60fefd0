"""Sandboxed processes for data that comes with a model: chat templates, regular expressions, tokenizers.

The processes have limits on time, memory and output and can be killed: an interpreter cannot limit such work from
within.
"""

from .limits import CHECK, MAX_TEMPLATE, Ended, Exceeded, Limits, NoProcess, Refused, render_limits
from .pool import POOL, Pool, Share, use_wait

__all__ = [
    "CHECK",
    "MAX_TEMPLATE",
    "POOL",
    "Ended",
    "Exceeded",
    "Limits",
    "NoProcess",
    "Pool",
    "Refused",
    "Share",
    "render_limits",
    "use_wait",
]
