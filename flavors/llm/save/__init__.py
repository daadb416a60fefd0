"""Logging a model: its parts are found, checked, converted and written."""
