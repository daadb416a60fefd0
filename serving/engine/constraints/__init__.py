"""Constraints on the next token: logits processors, grammars, and their masks."""
