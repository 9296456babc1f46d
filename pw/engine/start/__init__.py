"""How an engine comes to be: sources, memory demand, first widths, the parts put together."""
