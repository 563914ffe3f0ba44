"""Nodes and workers as plain data, the selection of targets, the snapshot, and the ssh files made of them."""
