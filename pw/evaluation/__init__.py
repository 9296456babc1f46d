"""How good and how fast a policy is: perplexity with paired intervals, speed beside others."""
