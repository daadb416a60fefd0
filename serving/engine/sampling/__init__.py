"""Sampling: one token from a row of logits, by seed and position."""
