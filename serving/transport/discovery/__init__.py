"""Finding or starting an engine process, and registering its clients."""
