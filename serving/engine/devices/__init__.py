"""Devices of an engine: transfers to a GPU, Triton, OpenMP's threads, contention for CPUs."""
