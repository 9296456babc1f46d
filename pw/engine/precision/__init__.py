"""Who changes bits at the safe point, by which numbers, and the trace of it."""
