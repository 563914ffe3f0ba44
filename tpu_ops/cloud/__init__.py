"""The Cloud TPU API: client, nodes, guest attributes and the accelerator table. Imports no other package."""
