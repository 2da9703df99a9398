"""Analyses of runs and machines: `innet-drl report`, `innet-drl analyze`."""
