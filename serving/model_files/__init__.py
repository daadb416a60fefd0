"""Readers of single files and names of a model: token bytes, end-of-text ids, URIs, image layouts."""
