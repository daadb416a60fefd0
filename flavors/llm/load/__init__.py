"""Loading a model, logged or not."""
