"""Parts of `benchmarks/kv.py`, one file each: what is done, its floor, and whether it holds."""
