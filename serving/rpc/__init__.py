"""KServe's inference service over gRPC, in a process of its own."""
