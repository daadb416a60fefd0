"""Quantisation when a model is logged: calibration, sensitivity, and writing the weights."""
