"""Device code: one kernel a file, the architecture in its name."""
