"""Several replicas behind one address, on Ray Serve (extra `ray`)."""
