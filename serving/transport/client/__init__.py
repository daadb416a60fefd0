"""The client's side of the connection to an engine process."""
