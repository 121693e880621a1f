"""KV memory: blocks as numbers on the host, and the arrays they stand for on the device."""
