"""The parts of ``gpu.py``: each yields records, which a process of its own prints and ``table.py`` shows."""
