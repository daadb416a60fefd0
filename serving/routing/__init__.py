"""In each worker: which endpoint, served entity and replica answers a request, following the controller's plan."""
