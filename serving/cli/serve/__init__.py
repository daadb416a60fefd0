"""``mlflow-llm serve``, ``engine`` and ``spec``: options, files of settings, and checks before a server starts."""
