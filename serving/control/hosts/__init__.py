"""Engines on joined hosts: the leader places them, a host runs what is placed on it, and gateways attach to them."""
