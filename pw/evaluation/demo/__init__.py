"""`make demo`: the whole job once, on the bundled model, through the doors that users have."""
