"""Proofs: a hash chain of settled rows, signatures by a key of the store, and hashes of what was asked and answered."""
