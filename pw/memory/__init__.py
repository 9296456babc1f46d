"""Runtime memory: one arena of pages that weights and KV cache share, and who owns each page."""
