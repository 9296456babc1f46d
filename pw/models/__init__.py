"""Hugging Face adapter: checkpoints, the model without its experts, experts and attention calls."""
