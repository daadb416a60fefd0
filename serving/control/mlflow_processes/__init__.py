"""Processes of a server that import MLflow to answer questions of workers: prompts of the registry, and scorers."""
