"""The SQL store: tables, connections, identity, and checks of the file below it."""
