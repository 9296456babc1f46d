"""Honest opponents: other ways to spend the same bytes. Each gives widths [n] in geometry order.

    uniform    APL: one width for all blocks, and the steps between two widths
    static     global allocation by hull or exact ILP over any score (GEMQ); per layer (MxMoE)
    controls   by routing frequency alone; the widths of another plan shuffled
    tokenwise  DP-LLM: each token chooses between two widths; memory is that of the wider

`pw.planning.bits_file.write_bits` makes of each what `static:<file>` serves.
"""
