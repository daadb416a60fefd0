"""Requests inside an engine: checked, awaited, delivered, finished."""
