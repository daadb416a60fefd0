"""Ollama's Modelfiles: their syntax, their templates as chat templates, and the models that they describe."""
