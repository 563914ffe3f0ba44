"""How workers are reached: ssh config and jumps, host keys, master connections, one command on many workers."""
