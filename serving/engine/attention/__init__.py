"""Attention over the KV cache, and the caches: slots on CPUs, blocks on GPUs."""
