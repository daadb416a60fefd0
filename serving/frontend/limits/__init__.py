"""Limits of each caller: bytes in memory, refusals, and what replies report in headers."""
