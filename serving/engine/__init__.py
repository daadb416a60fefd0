"""The engine: a loop around transformers' model code that serves many sequences at once."""
