"""Decode steps of fixed shape, so that a GPU can replay them from a captured graph."""
