"""What every operation shares: choosing an implementation, comparing outputs."""
