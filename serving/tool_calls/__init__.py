"""How models call tools: formats as data, calls read from a text, calls forced by a grammar."""
