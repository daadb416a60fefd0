"""Conversions between models of this flavor and those of other programs."""
