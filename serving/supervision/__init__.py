"""Keep engine processes running: start, probe, watch, restart and drain them."""
