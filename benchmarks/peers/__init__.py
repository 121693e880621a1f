"""The parts of `python benchmarks/peers.py`: environment, worker protocol, one worker per engine, report."""
