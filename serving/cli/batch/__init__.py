"""``mlflow-llm batch``: files of requests, answered by a server or by a model in this process."""
