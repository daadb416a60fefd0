"""Models made ready for the engine: loaded, fused, rewritten for the native step, verified."""
