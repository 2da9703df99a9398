"""Learning: updates, their arithmetic, and checkpoints of networks and optimizer."""
