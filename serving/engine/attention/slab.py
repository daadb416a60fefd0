"""Memory for the KV cache: address space that costs nothing until it is written and that can be given back."""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import torch

PAGE = mmap.PAGESIZE
# Linux's value; Python's mmap module has the name only since 3.13.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Slab:
    """A flat tensor of ``num_elements``.

    On CPU it is an anonymous mapping without reservation: pages that were never written occupy no memory, and
    ``release`` returns written ones to the operating system (they read as zeros afterwards). On other devices it is
    allocated at once and ``release`` does nothing.
    """

    def __init__(self, num_elements: int, dtype: Any, device: Any) -> None:
        self.itemsize = torch.empty((), dtype=dtype).element_size()
        self._map: mmap.mmap | None = None
        if torch.device(device).type == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self._map = mmap.mmap(-1, max(num_elements * self.itemsize, PAGE), flags=flags)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would make one token cost two megabytes
                with contextlib.suppress(OSError):  # kernels without huge pages refuse the advice
                    self._map.madvise(mmap.MADV_NOHUGEPAGE)
            self.tensor = torch.frombuffer(self._map, dtype=dtype, count=num_elements)
        else:
            self.tensor = torch.zeros(num_elements, dtype=dtype, device=device)

    def release(self, start: int, stop: int) -> None:
        """Return the whole pages within elements ``[start, stop)`` to the operating system."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-start * self.itemsize // PAGE) * PAGE
        last = stop * self.itemsize // PAGE * PAGE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
