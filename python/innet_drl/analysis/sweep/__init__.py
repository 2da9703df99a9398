"""How many actors, hardware threads and environments a machine needs, measured and predicted."""
