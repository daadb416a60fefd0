"""The server's half of a request that no protocol shapes: who calls, what is addressed, admission, limits, streams."""
