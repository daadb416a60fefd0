"""Tool calls of models: their formats as data, parsing calls from a text, and forcing calls with a grammar."""
