"""Training with prioritized replay. Needs the extra `train`."""
