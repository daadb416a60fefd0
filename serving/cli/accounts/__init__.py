"""``mlflow-llm keys``, ``limits``, ``prices``, ``usage``, ``windows``, ``ledger`` and ``audit``: who may use a server,
how much of it, and what was used."""
