"""Settings of a run: their types and bounds, files and presets."""
