"""From logits to tokens: what changes them, what grammar allows, the draw, log-probabilities."""
