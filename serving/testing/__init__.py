"""Doubles that are shipped: engines without weights, for tests and benchmarks of what lies around an engine."""
