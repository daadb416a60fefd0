"""Beam search over sequences of the engine."""
