"""What is kept of requests and engines: access records, metrics, traces."""
