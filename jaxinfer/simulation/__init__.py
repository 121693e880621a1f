"""The real scheduler and pools with a timing model in place of the device. No jax."""
