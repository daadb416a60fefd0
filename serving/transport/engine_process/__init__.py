"""The engine's side: the process that owns the model, and its loop."""
