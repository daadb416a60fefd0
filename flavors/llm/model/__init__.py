"""A saved model: its files, manifest, settings, signature, and where MLflow keeps it."""
