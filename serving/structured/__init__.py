"""JSON schemas, expressions and grammars of requests, made into grammars that an engine holds a text to."""
