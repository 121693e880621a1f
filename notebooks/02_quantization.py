# %% [markdown]
# # Quantization
#
# What int8 and int4 do to a model: the measured quality table drawn, the error of every matrix, and where int4 hurts.
#
# It needs `make setup`; SmolLM2's weights (93 MB) and the Brown corpus (3 MB) come on first use.

# %% [markdown]
# How much text the last part uses. More gives smoother figures.

# %% tags=["parameters"]
NUM_WINDOWS = 4  # windows of text for the layer by layer measurement
WINDOW = 128  # tokens of each
LAYERS = tuple(range(30))  # which layers are looked at

# %%
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxinfer import LLM
from jaxinfer.evaluation.corpus import brown_text
from jaxinfer.evaluation.scores import log_probs, measure_agreement, windows_of
from jaxinfer.quant.weight import method

# %% [markdown]
# ## The table
#
# `benchmarks/quality.py` measures every way of storing weights and KV against the same checkpoint in float32, on the Brown
# corpus; its results lie in the repository. A point further left takes less memory, a lower one says more nearly what the
# float model says.

# %%
results = sorted(Path("../benchmarks/results").glob("*-quality-*.json"))
tables = {path.stem.partition("-quality-")[2]: json.loads(path.read_text()) for path in results}
figure, axes = plt.subplots(1, len(tables), figsize=(5 * len(tables), 4.5), squeeze=False)
for axis, (model, table) in zip(axes[0], tables.items(), strict=True):
    for name, row in table["rows"].items():
        if name == "float32" or name.startswith("KV"):
            continue
        megabytes, kl = row["bytes_in_memory"] / 1e6, max(row["kl_mean"], 1e-7)
        axis.loglog(megabytes, kl, "o")
        axis.annotate(name, (megabytes, kl), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axis.set(title=model, xlabel="weights in memory, MB", ylabel="KL against float32, nat")
figure.tight_layout()

# %% [markdown]
# These three models ship quantized already, so "float32" is what their 4- and 5-bit blocks dequantize to. A method whose grid
# contains those values, such as int4 with a zero point over Q4_1's own groups of 32, reproduces them almost exactly: a real
# float model would show a larger error there. The weight error on real float32 weights stands in
# `docs/quantization.md` beside the table.

# %% [markdown]
# ## The error of every matrix
#
# Each matrix of the model is quantized and dequantized again. The figure shows the signal-to-noise ratio in decibels: 20 dB
# means that the error is a tenth of the weight.

# %%
llm = LLM(
    model="smollm2-135m",
    quantization="none",
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_model_len=WINDOW + 1,
    num_kv_blocks=64,
    show_progress=False,
)
METHODS = {
    "int8": method("int8"),
    "int4, groups of 32": method("int4", group_size=32),
    "int4, groups of 64": method("int4", group_size=64),
    "int4, 32, zero point": method("int4", group_size=32, zero_point=True),
}


def snr(weight: np.ndarray, restored: np.ndarray) -> float:
    """Signal-to-noise ratio in dB."""
    return float(10 * np.log10((weight.astype(np.float64) ** 2).sum() / max(((restored - weight).astype(np.float64) ** 2).sum(), 1e-30)))


errors: dict[str, dict[str, list[float]]] = {name: {} for name in METHODS}


def note_errors(path: str, array: jax.Array) -> jax.Array:
    """Measure every matrix of a layer; nothing is replaced."""
    if path.startswith("layers.") and array.ndim == 2 and int(path.split(".")[1]) in LAYERS:
        weight = np.asarray(array)
        for name, chosen in METHODS.items():
            matrix = path.split(".", 2)[2].removesuffix(".weight")
            errors[name].setdefault(matrix, []).append(snr(weight, chosen.from_float(weight).dequantize()))
    return array


with llm.engine.runner.replaced_weights(note_errors):
    pass
figure, axes = plt.subplots(1, len(METHODS), figsize=(4 * len(METHODS), 4), sharey=True)
for axis, (name, by_matrix) in zip(axes, errors.items(), strict=True):
    for matrix, values in by_matrix.items():
        axis.plot(range(len(values)), values, label=matrix)
    axis.set(title=name, xlabel="layer", ylim=(0, 70))
axes[0].set_ylabel("signal to noise, dB")
axes[-1].legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Where int4 hurts
#
# One layer at a time takes int4 weights, the others stay as they are; the bar is how far the answers move. The programs are
# not compiled anew: weights are their arguments.

# %%
windows = windows_of(brown_text(), llm.tokenizer, num_tokens=NUM_WINDOWS * WINDOW, window=WINDOW)
expected = [log_probs(llm.engine, window) for window in windows]
int4 = METHODS["int4, groups of 32"]


def with_int4(prefix: str):
    """Replaces the matrices whose path starts so by what int4 makes of them."""

    def replace(path: str, array: jax.Array) -> jax.Array:
        if path.startswith(prefix) and array.ndim == 2:
            return jnp.asarray(int4.from_float(np.asarray(array)).dequantize(), array.dtype)
        return array

    return replace


parts = [f"layers.{layer}." for layer in LAYERS] + ["embedding."]
kl = []
for part in parts:
    with llm.engine.runner.replaced_weights(with_int4(part)):
        kl.append(measure_agreement(llm.engine, windows, expected.__getitem__).kl_mean)

# %%
figure, axis = plt.subplots(figsize=(10, 3.5))
axis.bar([part.strip(".").removeprefix("layers.") for part in parts], kl)
axis.set(xlabel="the one layer in int4 (groups of 32, symmetric)", ylabel="KL against float32, nat", yscale="log")
worst = parts[int(np.argmax(kl))].strip(".")
axis.set_title(f"most sensitive: {worst}")
print(f"all layers one by one sum to {sum(kl):.4f} nat; the largest is {worst} with {max(kl):.4f}")

# %%
llm.close()
