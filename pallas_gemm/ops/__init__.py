"""What users call, and how it is lowered for one device or for many."""
