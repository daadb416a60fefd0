"""Records of requests and engines: access records, metrics, traces."""
