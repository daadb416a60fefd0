"""Sandboxed processes for text that came with a model: templates, regular expressions, tokenizers.

They have limits of time, memory and output and can be killed: no interpreter can bound such work inside itself.
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
