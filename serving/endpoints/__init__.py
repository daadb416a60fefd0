"""Endpoints as the management API has them: what is asked for, kept in the store, and shown."""
