"""KV in blocks, for CUDA devices: block tables, kernels over them, graphs of decode steps."""
