"""The wire: request bodies in, answers and stream chunks out. Plain functions and models, no aiohttp, no engine."""
