"""What models share. Every kernel call of the engine stands in here, inside a shard_map."""
