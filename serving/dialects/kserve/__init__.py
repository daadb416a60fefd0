"""KServe's Open Inference Protocol: JSON and binary tensors."""
