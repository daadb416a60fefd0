"""Gunicorn with gevent workers: sockets, connections, and what a request must be before there is one."""
