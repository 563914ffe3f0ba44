"""The lab: a local Cloud TPU API whose workers are containers. Nothing outside this package knows of it."""
