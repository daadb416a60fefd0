"""The management API: endpoints, accounts, usage, adapters, engine logs."""
