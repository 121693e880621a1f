"""Random keys of requests, derived on the host so that every bit of a 64-bit seed counts (no jax)."""

from __future__ import annotations

import hashlib


def derive_key(seed: int, sample_index: int) -> tuple[int, int]:
    """The two uint32 words that seed the stream of one completion.

    `seed` is any integer from -2**63 to 2**64 - 1 and every one of them gives a stream of its own: -1 and 2**64 - 1 differ.
    `sample_index` (0 to 2**32 - 1) tells the `n` completions of one request apart.

    Raises:
        OverflowError: for a seed or an index outside those ranges.
    """
    message = seed.to_bytes(9, "little", signed=True) + sample_index.to_bytes(4, "little")
    if not -(2**63) <= seed < 2**64:
        raise OverflowError(f"seed must be an integer from -2**63 to 2**64 - 1, got {seed}")
    digest = hashlib.blake2b(message, digest_size=8, person=b"jaxinfer-key").digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
