"""Engines side by side (`benchmarks/compare.py`): workloads, the protocol of a contender, figures and tables.

`drive`, `protocol` and `adapters` also run in the contenders' environments: the standard library and the contender's
own packages are all that they may import.
"""
