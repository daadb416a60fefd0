"""OpenAI's dialect, and its relatives: Databricks, MLflow, reranking, tokenisation."""
