"""Native kernels for CPUs with AVX2, AVX-512, NEON or SVE, including one for a whole decoder step.

They are optional. setup.py builds them if there is a C++ compiler. torch takes over if they are absent, if the
CPU is another, or if the setting ``kernels="torch"`` says so. Their interface is plain C, so one build serves
every Python.
"""
