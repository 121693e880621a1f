"""The engine's step, `forward` and the samplers, for Llama-3-8B and Qwen3-30B-A3B on 1 and 8 H200: memory, collectives, copies.

Four layers at full width tell what any number does; the whole depth is compiled nightly. Each kind of claim has a control, a step that is
broken on purpose: the check must refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.check_gpu.steps import (
    MAX_NUM_SEQS,
    MIB,
    MODELS,
    Program,
    bytes_per_device,
    elements_per_device,
    make_runner,
    refused,
    results_of_size,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxinfer.runner import ModelRunner

TIMEOUT_SECONDS = 240
NUM_LAYERS = 4
PREFILL_TOKENS = 2048

MAX_TEMP_BYTES = 64 * MIB
"""Temporaries of a decoding step; its logits are a result and not among them, but what is gathered of them over devices is."""
MAX_PREFILL_ROW_BYTES = 6
"""Further temporaries of a prefill, in bytes per token and column of its widest activations: in bfloat16, and once more in float32."""
ATTENTION = "paged_attention"
"""How the names of our kernels begin that every layer has to have."""
SMALL_BYTES = 2 * MIB
"""Arguments and constants that are neither weights nor KV: the packed batch, last tokens."""
SHARE_OF_MEMORY = 0.9
"""What a program may take at its peak of what the device has."""


def h200_mesh(num_devices: int) -> Mesh:
    """A mesh as the engine's, of devices that are not there."""
    from jaxinfer.sharding import TENSOR
    from pallas_kernels.deviceless.compiler import topology_mesh

    return topology_mesh("h200", {TENSOR: num_devices})


def expected_collectives(num_layers: int, num_devices: int) -> dict[str, int]:
    """Two sums a layer and one for the embedding, the logits gathered once."""
    return {"all-reduce": 2 * num_layers + 1, "all-gather": 1} if num_devices > 1 else {}


def check_forward(runner: ModelRunner, num_tokens: int, max_temp_bytes: int) -> dict[str, Any]:
    """Compile the step of `num_tokens` tokens and hold it to all that is claimed of it.

    Raises:
        AssertionError: what was claimed, and what came out.
    """
    from jaxinfer.forward_batch import StepSpec

    weights, kv = runner._weights, runner._kv
    program = Program.compile(runner.lower_forward(StepSpec(num_tokens, MAX_NUM_SEQS, MAX_NUM_SEQS)))
    memory = program.memory
    weight_bytes, kv_bytes = bytes_per_device(weights), bytes_per_device(kv)
    logit_bytes = MAX_NUM_SEQS * runner.vocab_size * 4
    surplus = memory.arguments - weight_bytes - kv_bytes
    assert 0 <= surplus <= SMALL_BYTES, f"arguments: {weight_bytes} of weights and {kv_bytes} of KV expected, {surplus:+} bytes differ"
    constant = program.largest_constant()
    assert constant <= SMALL_BYTES // 4, f"constants: weights are to be arguments, one constant has {constant} elements"
    assert memory.aliased >= kv_bytes, f"KV: {kv_bytes} bytes are to be written in place, {memory.aliased} are"
    pool = elements_per_device(runner._kv[0].keys)
    copies = results_of_size(program.text, pool)
    assert not copies, f"KV: arrays of a pool's size ({pool} elements) are made by {copies}"
    assert memory.temporaries <= max_temp_bytes, f"temporaries: at most {max_temp_bytes} bytes allowed, got {memory.temporaries}"
    budget = weight_bytes + kv_bytes + SMALL_BYTES + logit_bytes + max_temp_bytes
    assert memory.peak <= budget, f"peak: at most {budget} bytes allowed, got {memory.peak}"
    expected = expected_collectives(len(kv), runner.mesh.size)
    assert program.collectives == expected, f"collectives: {expected} expected, got {program.collectives}"
    num_attending = sum(count for name, count in program.kernels.items() if name.startswith(ATTENTION))
    assert num_attending >= len(kv), f"kernels: one of {ATTENTION} expected in each of {len(kv)} layers, got {program.kernels}"
    return {
        "peak_mib": round(memory.peak / MIB),
        "temp_mib": round(memory.temporaries / MIB, 1),
        "weights_mib": round(weight_bytes / MIB),
        "kv_mib": round(kv_bytes / MIB),
        "collectives": program.collectives,
        "kernels": program.kernels,
    }


def check_cut(model: str, num_devices: int, quantization: str, kinds: Sequence[str]) -> dict[str, Any]:
    """A decoding step, a prefill, or both, of a few layers."""
    config = MODELS[model]
    runner = make_runner(config, h200_mesh(num_devices), num_layers=NUM_LAYERS, quantization=quantization)
    sizes = {
        "decode": (MAX_NUM_SEQS, MAX_TEMP_BYTES),
        "prefill": (PREFILL_TOKENS, MAX_TEMP_BYTES + prefill_bytes(config, num_devices)),
    }
    return {kind: check_forward(runner, *sizes[kind]) for kind in kinds}


def prefill_bytes(config: Mapping[str, Any], num_devices: int) -> int:
    """What the activations of a prefill may take."""
    width = 2 * config["intermediate_size"] // num_devices
    if "num_experts" in config:  # every token is there once for each of its experts
        width = config["num_experts_per_tok"] * (2 * config["moe_intermediate_size"] // num_devices + config["hidden_size"])
    return PREFILL_TOKENS * (width + config["hidden_size"]) * MAX_PREFILL_ROW_BYTES


def check_samplers(num_devices: int) -> dict[str, Any]:
    """Both samplers over Llama's vocabulary, which every device has whole: no communication, last tokens written in place."""
    runner = make_runner(MODELS["llama3_8b"], h200_mesh(num_devices), num_layers=1)
    figures = {}
    for name, lower in (("greedy", runner.lower_greedy), ("full", runner.lower_full)):
        program = Program.compile(lower(MAX_NUM_SEQS))
        memory = program.memory
        logit_bytes = MAX_NUM_SEQS * runner.vocab_size * 4
        # The full sampler keeps probabilities, and integer weights that are halved into kept and left out.
        limit = MAX_TEMP_BYTES + (4 * logit_bytes if name == "full" else 0)
        assert memory.temporaries <= limit, f"{name}, temporaries: at most {limit} bytes allowed, got {memory.temporaries}"
        last_tokens = 4 * runner.shape.num_slots
        assert memory.aliased >= last_tokens, f"{name}: {last_tokens} bytes are to be written in place, {memory.aliased} are"
        assert not program.collectives, f"{name}: no collectives expected, got {program.collectives}"
        figures[name] = {"temp_mib": round(memory.temporaries / MIB, 1), "kernels": program.kernels}
    return figures


def check_full_depth(model: str, num_devices: int, quantization: str) -> dict[str, Any]:
    """All layers: the decoding step, and that it fits into the device's memory."""
    from pallas_kernels.deviceless.devices import facts

    runner = make_runner(MODELS[model], h200_mesh(num_devices), quantization=quantization)
    figures = check_forward(runner, MAX_NUM_SEQS, MAX_TEMP_BYTES)
    available = SHARE_OF_MEMORY * facts("h200").memory_bytes / MIB
    assert figures["peak_mib"] <= available, f"peak: {available:.0f} MiB are there, got {figures['peak_mib']}"
    return figures


# ---- controls: what must be refused ------------------------------------------------------------------------------------


def must_refuse(words: str, num_devices: int, target: str, replacement: Callable[..., Any]) -> dict[str, Any]:
    """A one-layer step with a part of it replaced has to be refused, with these words."""
    runner = make_runner(MODELS["llama3_8b"], h200_mesh(num_devices), num_layers=1)
    with mock.patch(target, replacement):
        return refused(words, partial(check_forward, runner, MAX_NUM_SEQS, MAX_TEMP_BYTES))


def without_donation() -> dict[str, Any]:
    """KV that is not donated is written into a second pool."""
    import jax

    original = jax.jit

    def jit(*args: Any, donate_argnums: Any = None, **options: Any) -> Any:
        return original(*args, **options)

    return must_refuse("written in place", 1, "jaxinfer.runner.jax.jit", jit)


def with_a_copied_pool() -> dict[str, Any]:
    """Keys that are scaled where they lie, as a quantization of the whole pool would be."""
    import jax

    from jaxinfer.layers import attention

    original = attention._write_and_attend

    def scaled(new: Any, kv: Any, *rest: Any, **options: Any) -> Any:
        factor = jax.tree.leaves(new)[0].reshape(-1)[0]
        return original(new, replace(kv, keys=kv.keys * factor), *rest, **options)

    return must_refuse("arrays of a pool's size", 1, "jaxinfer.layers.attention._write_and_attend", scaled)


def without_kernels() -> dict[str, Any]:
    """Every kernel of ours refuses: XLA's forms are taken, which are right and slow."""
    from pallas_kernels.common.dispatch import UnsupportedByKernel

    def refuse(interpret: bool) -> bool:
        raise UnsupportedByKernel("refused on purpose")

    return must_refuse("kernels: one of", 1, "pallas_kernels.common.mosaic.is_interpreted", refuse)


def with_wide_temporaries() -> dict[str, Any]:
    """A gather of every sequence's keys at the full length of its table."""
    from jaxinfer.layers import attention

    paged_attention = attention.paged_attention

    def gathered(q: Any, keys: Any, values: Any, tables: Any, *rest: Any, **options: Any) -> Any:
        import jax
        import jax.numpy as jnp

        everything = jax.lax.optimization_barrier(keys[:, tables[:, :64]])
        return paged_attention(q, keys, values, tables, *rest, **options) + jnp.max(everything)

    return must_refuse("temporaries", 1, "jaxinfer.layers.attention.paged_attention", gathered)


def with_a_second_sum() -> dict[str, Any]:
    """Rows summed twice over the devices."""
    from jax import lax

    from jaxinfer import sharding
    from jaxinfer.layers import linear

    reduced = linear._reduced_matmul
    return must_refuse(
        "collectives", 2, "jaxinfer.layers.linear._reduced_matmul", lambda x, weight: lax.psum(reduced(x, weight), sharding.TENSOR)
    )


def with_a_constant() -> dict[str, Any]:
    """A weight that the program has in itself."""
    import jax.numpy as jnp
    import numpy as np

    from jaxinfer.layers import embedding

    gathered = embedding._gathered_logits

    def shifted(x: Any, table: Any) -> Any:
        logits = gathered(x, table)
        return logits + jnp.asarray(np.random.default_rng(0).standard_normal(logits.shape, np.float32))

    return must_refuse("constants", 1, "jaxinfer.layers.embedding._gathered_logits", shifted)


PLACES = [(model, num_devices) for model in MODELS for num_devices in (1, 8)]

CHECKS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    **{f"{model}_{count}xh200_bfloat16": partial(check_cut, model, count, "none", ("decode", "prefill")) for model, count in PLACES},
    **{f"{model}_{count}xh200_w8a16": partial(check_cut, model, count, "int8_weight_only", ("decode",)) for model, count in PLACES},
    "samplers_8xh200": partial(check_samplers, 8),
    "control_without_donation": without_donation,
    "control_with_a_copied_pool": with_a_copied_pool,
    "control_without_kernels": without_kernels,
    "control_with_wide_temporaries": with_wide_temporaries,
    "control_with_a_second_sum": with_a_second_sum,
    "control_with_a_constant": with_a_constant,
}

NIGHTLY: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    **{f"{model}_{count}xh200_full_depth": partial(check_full_depth, model, count, "none") for model, count in PLACES},
    **{
        f"{model}_{count}xh200_w8a16_prefill": partial(check_cut, model, count, "int8_weight_only", ("prefill",)) for model, count in PLACES
    },
}
