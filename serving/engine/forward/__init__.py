"""The forward pass of a step: runners, CUDA graphs, asynchronous scheduling, draft models."""
