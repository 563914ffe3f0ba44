"""The lab: a local Cloud TPU API whose workers are containers. No other package but the command line uses it."""
