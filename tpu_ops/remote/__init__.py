"""One command on many workers, over multiplexed OpenSSH connections."""
