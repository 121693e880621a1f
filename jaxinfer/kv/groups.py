"""What a model keeps in its KV cache: groups of layers that share one block table. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxinfer.errors import ConfigError

KVGroupKind = Literal["full", "window", "latent"]


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer that is not below the quotient."""
    return -(-numerator // denominator)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTensorSpec:
    """One tensor that each layer of a group keeps per token: `[num_heads, head_dim]` of `dtype` (a numpy dtype name)."""

    name: str
    num_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroupSpec:
    """Layers that share one block pool and one block table.

    `full` keeps every token. `window` keeps what the last `window` positions may see: the token at position p attends
    to p - window + 1 .. p. `latent` (MLA) keeps every token, with its own tensors.

    Raises:
        ConfigError: for a kind that does not exist, no layers, or a window that does not match the kind.
    """

    kind: KVGroupKind
    layers: tuple[int, ...]
    window: int | None = None
    tensors: tuple[KVTensorSpec, ...]

    def __post_init__(self) -> None:
        if self.kind not in ("full", "window", "latent"):
            raise ConfigError(f"a KV group's kind must be full, window or latent, got {self.kind!r}")
        if not self.layers:
            raise ConfigError(f"a KV group needs at least one layer, got layers={self.layers!r}")
        if (self.kind == "window") != (self.window is not None) or (self.window is not None and self.window < 1):
            raise ConfigError(
                f"a KV group has a window >= 1 exactly when its kind is window, got {self.kind!r} with window={self.window!r}"
            )

    def num_dead_blocks(self, num_computed_tokens: int, block_size: int) -> int:
        """Leading blocks that no token from position `num_computed_tokens` on can see."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // block_size

    def num_blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Blocks with which `num_tokens` tokens are computed in steps of up to a block each; fewer make the steps smaller."""
        num_blocks = ceil_div(num_tokens, block_size)
        if self.window is None:
            return num_blocks
        # A step from position s touches s - window + 1 .. s + block_size - 1, which may begin anywhere in a block.
        return min(num_blocks, ceil_div(self.window + block_size - 2, block_size) + 1)

    def max_tokens(self, num_blocks: int, block_size: int) -> int | None:
        """Most tokens of one sequence that fit into `num_blocks` when computed one at a time; None: no limit."""
        if self.window is not None and num_blocks >= ceil_div(self.window - 1, block_size) + 1:
            return None
        return num_blocks * block_size
