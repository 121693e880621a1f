"""Kernels of an LLM inference engine, one folder per operation. Imports jax and numpy only; knows nothing of jaxinfer."""
