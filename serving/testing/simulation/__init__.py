"""Deterministic simulation of the ledger: its code under a clock, disk and database that fail as a seed says."""
