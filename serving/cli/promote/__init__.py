"""`mlflow-llm promote`: an alias of the registry is moved to a version, where asked only if that one answers better."""
