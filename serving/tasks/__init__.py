"""Between a decoded request and the engine: validation, text, and the pieces of a reply."""
