"""Records and protocols that every part of the server shares: requests, replies, events, errors, settings, engines."""
