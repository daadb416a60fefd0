"""The cores of the engine: one for models that generate, one for models that embed or score, and their base."""
