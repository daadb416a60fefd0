"""`mlflow-llm import`: models of Ollama and mlflow.transformers, and command lines of vLLM."""
