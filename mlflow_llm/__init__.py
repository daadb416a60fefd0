"""Take a language model from MLflow to production: log it once, serve it anywhere, count every token."""

__version__ = "0.1.0"
