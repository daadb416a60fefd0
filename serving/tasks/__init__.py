"""The steps between a decoded request and the engine: validation, text processing, and the pieces of a reply."""
