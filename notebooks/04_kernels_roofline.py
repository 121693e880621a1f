# %% [markdown]
# # Kernels and their roofline
#
# A GPU kernel cannot be faster than its bytes take to come from memory, nor than its multiplications take in the matrix units.
# The larger of the two times is its *floor*, and floor over time is how good it is: there is nothing to win beyond. This
# notebook computes the floor of every operation at the shapes of models that are served, counts the bytes that the kernels
# really move, and sets measured times beside them where there are any.
#
# It runs on a CPU and needs `make setup`. **Predicted** figures follow from an H200's datasheet and nobody measured them;
# **measured** ones come from `benchmarks/gpu/run.sh` on a GPU. Each figure says which it is.

# %% [markdown]
# What is looked at; `COUNTED` limits how many small cases are interpreted, which is what takes the time here.

# %% tags=["parameters"]
DEVICE = "h200"  # or "h100"
COUNTED = None  # kernels whose bytes are counted; None: all
SHARE = 0.8  # of the floor's speed that a good kernel reaches, for the predictions of a whole step

# %%
import importlib
import json
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

from pallas_kernels.common.discovery import operation_names
from pallas_kernels.common.served import cases
from pallas_kernels.deviceless.devices import facts

jax.config.update("jax_num_cpu_devices", 8)  # threads for the interpreter: a kernel's warpgroups wait for each other
device = facts(DEVICE)
rates = {"bytes_per_second": device.bandwidth, **device.peak_flops}
print(
    f"{device.kind}: {device.bandwidth / 1e12:.2f} TB/s, "
    + ", ".join(f"{kind} {rate / 1e12:.0f} T/s" for kind, rate in device.peak_flops.items())
)

# %% [markdown]
# ## Floors
#
# *Intensity* is operations per byte. Where it is below the ratio of the two rates, some 206 for bfloat16 on an H200, memory decides:
# every decode step is there, and that is why weights of fewer bits make it faster. Long prompts and large batches are beyond.

# %%
served = {operation: cases(operation, is_tiny=False) for operation in operation_names()}
ridge = device.peak_flops["bfloat16"] / device.bandwidth
print(f"{'case':42s} {'MB':>8s} {'GFLOP':>8s} {'op/byte':>8s} {'floor us':>9s}  bound by   (predicted: {device.kind})")
for operation, found in served.items():
    for case in found:
        intensity = case.floor_flops / case.floor_bytes
        bound = "memory" if case.floor_bytes / device.bandwidth >= case.floor_flops / rates[case.peak] else "products"
        print(
            f"{operation + ' ' + case.name:42s} {case.floor_bytes / 1e6:8.1f} {case.floor_flops / 1e9:8.1f} {intensity:8.1f} "
            f"{case.floor_seconds(rates) * 1e6:9.1f}  {bound}"
        )

# %% [markdown]
# ## Bytes that are really moved
#
# The floor counts each byte once. Does the kernel? Pallas' interpreter executes it on the CPU, copy by copy, and counts what goes
# to and from GPU memory. A ratio of 1.00 is perfect: what the kernel then loses, it loses in time, not in bytes.

# %%
checks = []
for operation in operation_names():
    try:
        budgets = importlib.import_module(f"pallas_kernels.{operation}.budgets")
    except ModuleNotFoundError:
        continue  # no kernel for GPUs yet
    checks += [(f"{operation} {check.name}", check.copied) for check in budgets.KERNELS if check.copied is not None]
print(f"{'small case':46s} {'counted':>9s} {'floor':>9s} {'ratio':>6s}   (counted in the interpreter)")
ratios = {}
for name, copied in checks[:COUNTED]:
    counted = copied.count()
    ratios[name] = counted / copied.floor_bytes
    print(f"{name:46s} {counted:9d} {copied.floor_bytes:9d} {ratios[name]:6.3f}")
assert all(0.999 <= ratio <= 1.05 for ratio in ratios.values()), "a kernel moves what it need not"

# %% [markdown]
# ## Measured
#
# What `benchmarks/gpu/run.sh` left behind, on whichever GPU it ran last. Copies at the speed that was measured on the spot are its
# yardstick, not the datasheet's bandwidth, which no program reaches.

# %%
folder = next(path for path in (Path.cwd(), *Path.cwd().parents) if (path / "benchmarks").is_dir()) / "benchmarks" / "results"
found = [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]
runs = [run for run in found if isinstance(run, dict) and run.get("benchmark") == "gpu" and not run.get("is_tiny")]
measured, yardstick = {}, None
if runs:
    run = max(runs, key=lambda run: run["date"])
    yardstick = next((row["bytes_per_second"] for row in run["parts"].get("copy", {}).get("rows", []) if row.get("what") == "copy"), None)
    for name, part in run["parts"].items():
        for row in part["rows"] if name.startswith("kernels_") else ():
            if row.get("contender") == "mosaic" and "microseconds" in row:
                measured[row["operation"], row["case"]] = (row.get("kernel_microseconds") or row["microseconds"]) * 1e-6
    print(f"measured on {run['date']}: copies at {(yardstick or 0) / 1e12:.2f} TB/s, {len(measured)} cases")
    for (operation, name), seconds in measured.items():
        case = next((case for case in served[operation] if case.name == name), None)
        if case is not None:
            print(
                f"  {operation + ' ' + name:42s} {seconds * 1e6:9.1f} us, {case.floor_seconds(rates) / seconds:6.1%} of the datasheet's roofline"
            )
else:
    print("no measurement of a GPU is in benchmarks/results: everything below is predicted")

# %% [markdown]
# ## The roofline
#
# Above the slanted part a kernel would have to read faster than the memory gives, above the flat part to multiply faster than the
# matrix units do. Open circles stand on the roof: they are floors, predicted. Full ones are measured, and hang below it.

# %%
figure, axes = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
intensities = np.geomspace(0.3, 4000, 200)
for kind, colour in (("bfloat16", "#4477aa"), ("int8", "#cc6677")):
    roof = np.minimum(device.peak_flops[kind], intensities * device.bandwidth) / 1e12
    axes.loglog(intensities, roof, color=colour, lw=1, label=f"roof, {kind} (datasheet)")
markers = dict(zip(served, "osD^vP", strict=False))
for operation, found in served.items():
    points = [case for case in found if case.floor_flops]
    if not points:
        continue  # it multiplies nothing
    x = np.array([case.floor_flops / case.floor_bytes for case in points])
    y = np.array([case.floor_flops / case.floor_seconds(rates) for case in points]) / 1e12
    axes.loglog(x, y, markers[operation], mfc="none", ms=6, color="#555555", label=f"{operation}, predicted")
    real = [(case, measured[operation, case.name]) for case in points if (operation, case.name) in measured]
    if real:
        x = [case.floor_flops / case.floor_bytes for case, _ in real]
        axes.loglog(
            x, [case.floor_flops / seconds / 1e12 for case, seconds in real], markers[operation], ms=6, label=f"{operation}, measured"
        )
axes.axvline(ridge, color="#bbbbbb", lw=0.8, zorder=0)
axes.text(ridge * 1.05, 0.5, f"{ridge:.0f} operations per byte", rotation=90, fontsize=8, color="#777777")
axes.set(xlabel="operations per byte", ylabel="T operations per second", title=f"{device.kind}: floors of the operations at served shapes")
axes.legend(fontsize=7, frameon=False, loc="upper left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What it means for a model
#
# A decode step of Llama-3-8B reads every weight once and every row's keys and values once, whatever the number of rows. So its floor is
# known before anything runs, and so is what fewer bits bring: much for one row, less for many, as the KV does not shrink with the weights.

# %%
LAYERS, WIDTH, INNER, KV, VOCABULARY = 32, 4096, 14_336, 1024, 128_256
matrices = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * KV + 3 * WIDTH * INNER) + WIDTH * VOCABULARY
BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4, groups of 32": 0.5 + 2 / 32}
CONTEXT = 2048
rows = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])


def step_seconds(bytes_per_weight: float, num_rows: np.ndarray) -> np.ndarray:
    """Weights and KV at the memory's speed, or the products at the matrix units', whichever is longer."""
    kv = num_rows * CONTEXT * LAYERS * 2 * KV * 2
    reading = (matrices * bytes_per_weight + kv) / device.bandwidth
    return np.maximum(reading, 2.0 * matrices * num_rows / device.peak_flops["bfloat16"])


figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name, size in BYTES.items():
    speeds = SHARE * rows / step_seconds(size, rows)
    axes.loglog(rows, speeds, "o--", mfc="none", label=f"{name}, predicted at {SHARE:.0%} of the floor's speed")
    print(f"{name:20s} predicted: {speeds[0]:6.0f} tokens/s for one row, {speeds[-1]:7.0f} for {rows[-1]}, at contexts of {CONTEXT}")
if runs:
    for storage in ("bfloat16", "int8_weight_only", "int4"):
        decoded = [
            row for row in run["parts"].get(storage, {}).get("rows", []) if row.get("what") == "decode" and "tokens_per_second" in row
        ]
        if decoded:
            axes.loglog(
                [row["rows"] for row in decoded],
                [row["tokens_per_second"] for row in decoded],
                "o",
                label=f"{storage}, measured at short contexts",
            )
axes.set(xlabel="rows that decode at once", ylabel="tokens per second", title=f"Llama-3-8B on one {device.kind}, contexts of {CONTEXT}")
axes.legend(fontsize=8, frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()
gains = step_seconds(BYTES["bfloat16"], rows) / step_seconds(BYTES["int8"], rows)
assert gains[0] > 1.8 > gains[-1], "fewer bits bring most where the weights are most of what is read"
