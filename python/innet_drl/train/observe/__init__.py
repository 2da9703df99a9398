"""What a run measures, and where it is written and shown."""
