"""The bytes of an HTTP request: body, keep-alive, and what is refused before a handler runs."""
