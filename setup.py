"""Metadata lives in setup.cfg; this file lets tools that call setup.py directly work."""

from setuptools import setup

setup()
