"""Runs on this machine: starts the processes of a training, and restarts them."""
