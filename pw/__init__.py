"""PagedWeight: serve Mixture-of-Experts models whose weights and KV cache share one budget."""

__version__ = "0.1.0"
