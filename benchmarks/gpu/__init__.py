"""Everything that is to be known about this engine on one GPU, in eight minutes: `benchmarks/gpu/run.sh`."""
