"""Kernels of our own for processors with AVX2, AVX-512, NEON or SVE, and a decoder step that runs whole in one of them.

Optional: setup.py builds them where a C++ compiler is, and torch takes over wherever they are absent, the processor
is another, or the setting ``kernels="torch"`` says so. Plain C underneath, so that one build serves every Python.
"""
