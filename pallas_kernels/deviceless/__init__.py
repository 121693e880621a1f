"""Compiling for NVIDIA GPUs where there is none, and reading off what came out. Needs JAX's CUDA plugin and ptxas, but no driver."""
