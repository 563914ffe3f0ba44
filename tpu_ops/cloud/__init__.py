"""The Cloud TPU API: nodes, their listing, creation, deletion and recreation; credentials, accelerators, buckets."""
