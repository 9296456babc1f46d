"""PagedWeight: serve Mixture-of-Experts models whose weights and KV cache share one budget."""

__version__ = "0.1.0"
FORMAT_VERSION = 1  # of artifacts that this program writes; newer ones are refused
