"""Packed weights: prepared once, kept on disk, mapped by every engine of the model."""
