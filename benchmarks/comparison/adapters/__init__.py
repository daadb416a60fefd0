"""One module per contender: it makes an `Engine` of `drive` and serves it, as ``python -m
comparison.adapters.NAME``."""
