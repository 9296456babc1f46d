"""The engine's process as the server sees it."""
