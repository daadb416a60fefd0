"""Weights as an engine computes with them: layouts, quantisation, linears, experts."""
