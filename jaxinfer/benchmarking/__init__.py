"""Measurements of a loaded model with synthetic prompts: latency of one batch, throughput of many requests."""
