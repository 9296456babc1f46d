"""`pw bench`: throughput and latency of an engine, a server under load, memory under pressure."""
