"""An engine in a separate process, and the clients that share it."""

from .client.client import RemoteEngine, attach, connect

__all__ = ["RemoteEngine", "attach", "connect"]
