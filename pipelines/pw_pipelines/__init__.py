"""Offline stages: codebook fit, quantize, sensitivity, routing trace, residual fit."""
