"""How an engine process is found, or started, and who its clients are."""
