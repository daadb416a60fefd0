"""Work of workers beside requests: queues of copies and payloads, and threads for the store."""
