"""Doubles that are shipped: engines without weights, and a machine with faults for the ledger to run on."""
