"""Choose, in each worker, the endpoint, served entity and replica for a request, following the controller's plan."""
