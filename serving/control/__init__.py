"""The controller process, which makes the server serve what the store says, and what it shares with the workers."""
