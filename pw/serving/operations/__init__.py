"""What operators see and do: health, metrics, logs, live page, control routes."""
