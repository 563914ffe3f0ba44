"""Reaches workers by ssh: ssh config and jump hosts, host keys, master connections, one command on many workers."""
