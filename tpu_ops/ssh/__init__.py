"""How a worker is reached: ssh config and jumps, host keys, master connections, and one command on many workers."""
