"""How much memory loading takes, measured in a process of its own: the weights themselves, and the peak on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.checkpoints.convert import ConvertOptions, convert

pytestmark = pytest.mark.nightly

MEASURE = """
import json, re, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
import jax.numpy as jnp
from jaxinfer import sharding
from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.load import Storage, declare_parameters, load_parameters
from jaxinfer.models.config import find

def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

model, dtype, num_devices, keeps_packed = json.loads(sys.argv[1])
checkpoint = open_checkpoint(model)
architecture = find(checkpoint.config, model)
config = architecture.Config.from_hf(checkpoint.config, model)
mesh = sharding.make_mesh(num_devices)
module = architecture.Model(config, mesh, jnp.dtype(dtype), 512)
slots = declare_parameters(module, mesh, checkpoint, Storage(keeps_packed=keeps_packed), config.unused_tensors)
jax.block_until_ready(jnp.zeros(3))
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
load_parameters(slots, checkpoint, mesh)
weights = [leaf for slot in slots for leaf in jax.tree.leaves(getattr(slot.module, slot.name).get_value())]
jax.block_until_ready(weights)
print(json.dumps({"weights": sum(leaf.nbytes for leaf in weights), "peak": memory("VmHWM") - before, "held": memory("VmRSS") - before}))
"""


def measure(model: Path, dtype: str, num_devices: int, *, keeps_packed: bool) -> dict[str, int]:
    arguments = json.dumps([str(model), dtype, num_devices, keeps_packed])
    child = subprocess.run([sys.executable, "-c", MEASURE, arguments], capture_output=True, text=True, timeout=100, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout)


def check(measured: dict[str, int]) -> None:
    assert measured["peak"] <= max(1.5 * measured["weights"], measured["weights"] + 200e6), measured
    assert measured["held"] >= 0.8 * measured["weights"], f"the measurement sees no memory: {measured}"


def test_packed_weights_take_what_the_file_takes(smollm2_path: Path) -> None:
    measured = measure(smollm2_path, "float32", 1, keeps_packed=True)
    assert measured["weights"] <= 1.25 * smollm2_path.stat().st_size, measured
    check(measured)
    assert measured["peak"] <= 1.25 * smollm2_path.stat().st_size + 100e6, "blocks were inflated on the way"


def test_bfloat16_shards_onto_three_devices(smollm2_path: Path, tmp_path: Path) -> None:
    folder = convert(str(smollm2_path), tmp_path / "hf", ConvertOptions(dtype="bfloat16", max_shard_bytes=100_000_000))
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    measured = measure(folder, "bfloat16", 3, keeps_packed=False)
    assert measured["weights"] < 272e6
    check(measured)
