"""Gunicorn with gevent workers: sockets, connections, and the checks before a request reaches the application."""
