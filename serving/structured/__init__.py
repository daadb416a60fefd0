"""Turns the JSON schemas, regular expressions and grammars of requests into grammars that an engine enforces."""
