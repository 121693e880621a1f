"""The engine's own step programs for GPUs that are not there: models of published shapes without weights, and what comes out."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from pallas_kernels.deviceless.compiler import Memory, memory_of

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxinfer.checkpoints.source import Checkpoint
    from jaxinfer.runner import ModelRunner

MIB = 1 << 20

# config.json as published, without what no program depends on.
LLAMA3_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODELS: Mapping[str, Mapping[str, Any]] = {"llama3_8b": LLAMA3_8B, "qwen3_30b_a3b": QWEN3_30B_A3B}

MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 64
BLOCK_SIZE = 16
NUM_BLOCKS = 2**15 - 1
"""Half a million tokens: a layer's keys are then larger than any other array, and a copy of them cannot hide among temporaries."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
IN_PLACE = frozenset(
    ("parameter", "bitcast", "get-tuple-element", "tuple", "scatter", "fusion", "custom-call", "dynamic-update-slice", "while", "call")
)
"""What may give an array of a pool's size: names for what is there, and writes into it. What XLA fuses is looked at by itself."""


def published_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of such a checkpoint, by Hugging Face's names."""
    size, hidden, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", size // config["num_attention_heads"])
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, size), "model.norm": (size,), "lm_head": (vocab, size)}

    def add_mlp(name: str, hidden: int) -> None:
        shapes.update({f"{name}.gate_proj": (hidden, size), f"{name}.up_proj": (hidden, size), f"{name}.down_proj": (size, hidden)})

    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}"
        attention = f"{name}.self_attn"
        shapes |= {f"{name}.input_layernorm": (size,), f"{name}.post_attention_layernorm": (size,)}
        shapes |= {f"{attention}.q_proj": (query, size), f"{attention}.k_proj": (kv, size), f"{attention}.v_proj": (kv, size)}
        shapes |= {f"{attention}.o_proj": (size, query)}
        if config["model_type"] == "qwen3_moe":
            shapes |= {f"{attention}.q_norm": (head_dim,), f"{attention}.k_norm": (head_dim,)}
            shapes |= {f"{name}.mlp.gate": (config["num_experts"], size)}
            for expert in range(config["num_experts"]):
                add_mlp(f"{name}.mlp.experts.{expert}", config["moe_intermediate_size"])
        else:
            add_mlp(f"{name}.mlp", hidden)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _checkpoint(config: Mapping[str, Any]) -> Checkpoint:
    from jaxinfer.checkpoints.source import Checkpoint, LazyTensor

    def nothing() -> Any:
        raise AssertionError("nothing is to be read")

    tensors = {name: LazyTensor(shape, "bfloat16", nothing) for name, shape in published_shapes(config).items()}
    return Checkpoint("published", Path("published"), config, tensors, {}, nothing)


def make_runner(config: Mapping[str, Any], mesh: Mesh, *, num_layers: int | None = None, quantization: str = "none") -> ModelRunner:
    """The runner that the engine would have over this mesh, but for the weights; as many layers as there are if not told otherwise."""
    import jax.numpy as jnp

    from jaxinfer import sharding
    from jaxinfer.batching import BatchShape, Buckets
    from jaxinfer.checkpoints.load import declare_parameters
    from jaxinfer.config import EngineConfig
    from jaxinfer.kv.cache import layer_shapes, spread_over
    from jaxinfer.models.config import find
    from jaxinfer.runner import ModelRunner
    from jaxinfer.startup import resolve_storage

    config = {**config, "num_hidden_layers": num_layers or config["num_hidden_layers"]}
    checkpoint = _checkpoint(config)
    architecture = find(config, "config.json")
    model_config = architecture.Config.from_hf(config, "config.json")
    storage = resolve_storage(EngineConfig.from_options(quantization=quantization))
    model = architecture.Model(model_config, mesh, jnp.dtype("bfloat16"), MAX_MODEL_LEN)
    declare_parameters(model, mesh, checkpoint, storage, place=sharding.struct)
    groups = spread_over(architecture.kv_groups(model_config, "bfloat16"), mesh)
    return ModelRunner(
        model,
        mesh=mesh,
        kv_shapes=layer_shapes(groups, [NUM_BLOCKS] * len(groups), BLOCK_SIZE, mesh),
        buckets=Buckets.build(MAX_NUM_SEQS, 2048, 1),
        shape=BatchShape.build(len(groups), MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS),
        vocab_size=model_config.vocab_size,
        valid_vocab_size=model_config.vocab_size,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a program compiled to; bytes are those of one device."""

    memory: Memory
    text: str
    """Its final HLO."""

    @classmethod
    def compile(cls, lowered: jax.stages.Lowered) -> Program:
        """Compile for the device that it was lowered for."""
        compiled = lowered.compile()
        stats, text = compiled.memory_analysis(), compiled.as_text()
        assert stats is not None and text is not None, "the compiler gives no account of memory, or no HLO"
        return cls(memory=memory_of(stats), text=text)

    @property
    def collectives(self) -> dict[str, int]:
        """How many of each kind; one that is started and awaited counts once."""
        found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", self.text)
        return dict(Counter(found))

    @property
    def kernels(self) -> dict[str, int]:
        """How many of our own, by the operation that launches them."""
        calls = [line for line in self.text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
        paths = [re.search(r'op_name="([^"]*)"', line) for line in calls]
        # The last part of the path is how Pallas calls a kernel, the one before is the kernel's name.
        return dict(Counter(path[1].split("/")[-2] if path else "without a name" for path in paths))

    def largest_constant(self) -> int:
        """Elements of the largest constant."""
        shapes = re.findall(r" = [a-z]\w*\[([\d,]*)\]\S* constant\(", self.text)
        return max((math.prod(int(size) for size in shape.split(",") if size) for shape in shapes), default=0)


def results_of_size(hlo: str, num_elements: int) -> dict[str, int]:
    """How many instructions of a program have a result of so many elements, by opcode, those that are none of `IN_PLACE`."""
    found: Counter[str] = Counter()
    for shape, opcode in re.findall(r" = [a-z]\w*\[([\d,]*)\]\S* ([a-z-]+)\(", hlo):
        if opcode not in IN_PLACE and math.prod(int(size) for size in shape.split(",") if size) == num_elements:
            found[opcode] += 1
    return dict(found)


def bytes_per_device(tree: Any) -> int:
    """Of ShapeDtypeStructs that lie on a mesh."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def elements_per_device(leaf: Any) -> int:
    """Of one ShapeDtypeStruct that lies on a mesh."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def refused(words: str, check: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """A check that has to refuse what it is given, with these words.

    Raises:
        AssertionError: it accepted, or refused for another reason.
    """
    try:
        figures = check()
    except AssertionError as refusal:
        assert words in str(refusal), f"a refusal with {words!r} expected, got: {refusal}"
        return {"refused": str(refusal)}
    raise AssertionError(f"accepted: {figures}")
