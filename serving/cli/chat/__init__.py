"""``mlflow-llm chat`` and ``mlflow-llm logs``: conversations in the terminal, and the record of them."""
