"""Sandboxed processes for data that comes with a model or a request: chat templates, regular expressions, tokenizers,
images.

The processes have limits on time, memory and output and can be killed: an interpreter cannot limit such work from
within.
"""

from .limits import CHECK, MAX_TEMPLATE, Ended, Exceeded, Limits, NoProcess, Refused, decode_limits, render_limits
from .pool import IMAGES, POOL, Pool, Share, use_wait, wait

__all__ = [
    "CHECK",
    "IMAGES",
    "MAX_TEMPLATE",
    "POOL",
    "Ended",
    "Exceeded",
    "Limits",
    "NoProcess",
    "Pool",
    "Refused",
    "Share",
    "decode_limits",
    "render_limits",
    "use_wait",
    "wait",
]
