"""Triton's generate extension, and MindIE's and TGI's ``generate``."""
