"""Tables of request fields, and the readers that dialects share."""
