"""Keys, limits, prices and the audit log: what an operator sets and who may see it."""
