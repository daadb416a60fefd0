"""A loaded model: ``predict``, the object API, and MLflow's scoring server."""
