"""Media of a request: fetched, checked and decoded."""
