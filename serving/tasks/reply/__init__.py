"""From an engine's events to the pieces of a reply."""
