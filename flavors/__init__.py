"""MLflow flavors of this project."""
