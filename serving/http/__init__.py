"""The HTTP API: a Flask application over routes, and what answers them; no server of its own."""
