"""Starts a run again when its nodes are taken away."""
