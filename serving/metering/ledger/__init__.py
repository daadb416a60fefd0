"""The ledger: a row per request, reserved at admission and settled at its end, also after a crash."""
