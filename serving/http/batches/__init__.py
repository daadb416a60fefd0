"""OpenAI's routes for files and batches."""
