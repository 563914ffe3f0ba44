"""The lab: a local Cloud TPU API whose workers are containers. Only the command line imports this package."""
