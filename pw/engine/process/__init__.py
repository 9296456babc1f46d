"""The engine in a process of its own: its loop, its wire, its entry point."""
