"""The lab's Cloud TPU API: one state, served as gRPC and as REST/JSON from one process."""
