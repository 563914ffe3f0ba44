"""The lab's Cloud TPU API: one process serves the same state over gRPC and REST/JSON."""
