"""KServe's inference service over gRPC, in a separate process."""
