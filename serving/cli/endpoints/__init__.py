"""``mlflow-llm endpoints`` and ``mlflow-llm top``: what a server serves, and how it is changed and watched."""
