"""Scheduling: which tokens of which sequences run in a step."""
