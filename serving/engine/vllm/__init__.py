"""vLLM as an engine: its scheduler and model code behind ``Core``, in an engine process of its own interpreter."""
