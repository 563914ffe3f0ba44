"""The recovery of runs: a run whose nodes are taken away, or whose command fails, is started again."""
