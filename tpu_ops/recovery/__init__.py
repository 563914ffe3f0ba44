"""The recovery of a run whose nodes are taken away."""
