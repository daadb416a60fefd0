"""Work between matrix products by our own kernels on CUDA: norms, gates, residuals and rotary embeddings."""
