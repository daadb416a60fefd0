"""Endpoints of the management API: how they are requested, stored and shown."""
