"""One replica on several GPUs: ranks that compute each step together, one of which decides."""
