"""Planning: which widths the blocks should have, from measured numbers alone.

Pure: no device, no clock, no randomness. The numbers meet in this order (formulas in each module):

    table      widths, costs in bytes and offline sensitivity of every block
    routing    routing mass of every expert, online, shrunk toward the offline trace
    residual   how much more a prompt suffers from a block than the average text did
    damage     routing x residual x sensitivity = predicted damage; bit floors of hot experts
    pressure   how many pages to release or to reload now
    planner    which blocks move (ladder: prices of their steps; fill: the exact last step)
    rebalance  which blocks trade planes when routing or prompts moved on
    bits_file  a fixed allocation on disk
"""
