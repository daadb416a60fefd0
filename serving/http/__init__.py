"""The HTTP API: a Flask application, its routes and their handlers. It does not open sockets itself."""
