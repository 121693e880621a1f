# %% [markdown]
# # KV memory
#
# Every token that a model has read leaves keys and values behind, and whoever serves a model mostly manages that memory. This
# notebook shows where it goes: what a block costs, what paging saves, who shares blocks with whom, and what a lower tier is
# worth.
#
# It needs `make setup`; SmolLM2's weights (93 MB) and the Brown corpus (3 MB) come on first use.

# %% [markdown]
# Sizes that decide how long this notebook takes. Larger ones give smoother figures.

# %% tags=["parameters"]
NUM_REQUESTS = 2000  # requests of the fragmentation study
TURNS = 12  # turns of the conversation
LENGTHS = (16, 64, 128, 256, 512, 1024)  # prompts that are fetched or computed again
PROMPT_TOKENS = 1024  # the prompt whose way through the tiers is timed; a multiple of 16, none of LENGTHS is larger
ANSWER_TOKENS = 48  # of the block map and of best-of-n
REPEATS = 3  # times that each of them is measured

# %%
import statistics
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from jaxinfer import LLM, SamplingParams
from jaxinfer.benchmarking.lengths import draw_lengths
from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.evaluation.corpus import brown_text
from jaxinfer.request import GenerationRequest, RequestId
from jaxinfer.simulation.options import SimulationOptions, TraceOptions
from jaxinfer.simulation.run import Simulation
from jaxinfer.simulation.server import build_server
from jaxinfer.simulation.timing import H200_LLAMA_8B
from jaxinfer.simulation.traces import make_trace

# %% [markdown]
# ## What a token costs
#
# For each token every layer keeps a key and a value for every KV head: 2 × layers × KV heads × head dimension numbers. Fewer
# KV heads (grouped queries) or one latent vector instead of them (DeepSeek) are attempts to make this smaller.

# %%
MODELS = {  # layers x numbers per layer and token, in two bytes each
    "Llama 2 13B": 40 * 2 * 40 * 128,
    "Llama 3.1 70B": 80 * 2 * 8 * 128,
    "Llama 3.1 8B": 32 * 2 * 8 * 128,
    "DeepSeek V3": 61 * 576,
    "Qwen 2.5 7B": 28 * 2 * 4 * 128,
    "SmolLM2 135M": 30 * 2 * 3 * 64,
}
kilobytes = {name: 2 * numbers / 1024 for name, numbers in MODELS.items()}
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
bars = axes.barh(list(kilobytes), list(kilobytes.values()), color="#4477aa")
axes.bar_label(bars, [f"{size:.0f} KiB, {size / 512:.2f} GiB per 2,048 tokens" for size in kilobytes.values()], padding=4, fontsize=8)
axes.set(xlabel="KiB per token, bfloat16", xlim=(0, 1.75 * max(kilobytes.values())), title="Keys and values of one token")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## What paging saves
#
# Nobody knows how long an answer will be. Without paging a sequence needs one contiguous stretch of memory, so room is set
# aside for what *might* come: the whole context ("max"), the answer rounded up to a power of two ("pow2"), or, if an oracle
# told, exactly what is needed. Even the oracle's room stands empty until the sequence has grown into it, and the gaps between
# stretches are often too small for the next one.
#
# This is figure 2 of the PagedAttention paper (Kwon et al. 2023) on lengths like ShareGPT's. Paging is the engine's own
# scheduler on a simulated device; a block of 16 tokens is given out when the one before it is full, so all that is lost is what
# is empty in each sequence's last block. What is not given out there is no gap: any sequence can have it, and some is kept back
# so that those that run can grow.

# %%
CONTEXT, POOL, BLOCK_SIZE = 2048, 32 * 2048, 16
KINDS = ("tokens", "reserved for later", "never used", "gaps between")


def contiguous(lengths, size_of):
    """Shares of the pool by kind, mean over the steps in which somebody waits; one stretch per sequence, first fit."""
    waiting, running, sums, num_steps = deque(lengths), [], np.zeros(4), 0
    while waiting:
        while waiting:
            prompt, output = waiting[0]
            size, end = size_of(prompt, output), 0
            for start, taken, *_ in sorted(running):
                if start - end >= size:
                    break
                end = start + taken
            if POOL - end < size:
                break
            running.append([end, size, prompt, prompt + output])
            waiting.popleft()
        while waiting and all(now < final for _, _, now, final in running):
            held, now, final = (sum(seq[column] for seq in running) for column in (1, 2, 3))
            sums += now, final - now, held - final, POOL - held
            num_steps += 1
            for seq in running:
                seq[2] += 1
        running = [seq for seq in running if seq[2] < seq[3]]
    return sums / num_steps / POOL


def paged():
    """The same with blocks, from a simulation of the engine's scheduler."""
    limits = SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=2048, max_model_len=CONTEXT)
    cache = CacheConfig(num_kv_blocks=POOL // BLOCK_SIZE, block_size=BLOCK_SIZE, prefix_caching="off", host_kv_bytes=0)
    trace = make_trace(TraceOptions(num_requests=NUM_REQUESTS, arrivals="at-once"), CONTEXT)
    series = Simulation(build_server(cache, limits, SimulationOptions(), H200_LLAMA_8B), trace, H200_LLAMA_8B).run().series
    seconds, num_waiting, _, held, _, empty = np.array(series.rows).T
    weights = seconds * (num_waiting > 0)
    held, empty = (float((column * weights).sum() / weights.sum() / POOL) for column in (held, empty))
    return np.array([held - empty, 0.0, empty, 1 - held])


lengths = draw_lengths(NUM_REQUESTS, max_prompt_len=1024, max_output_len=1024, seed=0)
shares = {
    "max": contiguous(lengths, lambda prompt, output: CONTEXT),
    "pow2": contiguous(lengths, lambda prompt, output: min(CONTEXT, prompt + 2 ** int(np.ceil(np.log2(output))))),
    "oracle": contiguous(lengths, lambda prompt, output: prompt + output),
    "paged": paged(),
}

# %%
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
bottom = np.zeros(len(shares))
for kind, color, values in zip(KINDS, ("#228833", "#ccbb44", "#ee6677", "#bbbbbb"), np.array(list(shares.values())).T, strict=True):
    bars = axes.bar(list(shares), 100 * values, bottom=bottom, color=color, label=kind if kind != "gaps between" else "not given out")
    axes.bar_label(bars, [f"{100 * value:.0f} %" if value > 0.03 else "" for value in values], label_type="center", fontsize=9)
    bottom += 100 * values
axes.set(ylabel="share of KV memory, %", title="Where KV memory goes while requests wait")
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()
lost = {name: 100 * (values[1] + values[2]) / values[:3].sum() for name, values in shares.items()}
print("of what sequences hold there is no token in", ", ".join(f"{value:.1f} % ({name})" for name, value in lost.items()))

# %% [markdown]
# ## An engine with three tiers
#
# Device, host memory and disk. On a CPU all of it is the same memory, so a copy is cheap; on a GPU the way to the host goes
# through PCIe. The pool is small here, so that a picture shows every block; host memory takes just one prompt, so that the
# second one pushes the first to disk.

# %%
folder = tempfile.TemporaryDirectory()
BLOCK_BYTES = 2 * 2 * MODELS["SmolLM2 135M"] * BLOCK_SIZE  # float32
llm = LLM(
    model="smollm2-135m",
    quantization="int8",
    max_num_seqs=8,
    max_num_batched_tokens=256,
    max_model_len=CONTEXT,
    block_size=BLOCK_SIZE,
    num_kv_blocks=320,
    host_kv_bytes=PROMPT_TOKENS // BLOCK_SIZE * BLOCK_BYTES,
    disk_kv_path=Path(folder.name),
    show_progress=False,
)
engine, tiers = llm.engine, llm.engine.scheduler.tiers
assert tiers.limits.block_bytes == (BLOCK_BYTES,)
print(f"a block of {BLOCK_SIZE} tokens has {BLOCK_BYTES:,} bytes")

text = []
for sample in brown_text():
    text += llm.tokenizer.encode(sample)
    if len(text) > 40_000:
        break
greedy = SamplingParams(temperature=0.0, max_tokens=1)
num_read = 0


def fresh(num_tokens):
    """Tokens of the corpus that nobody has seen yet."""
    global num_read
    num_read += num_tokens
    return text[num_read - num_tokens : num_read]


# %% [markdown]
# ## A map of the blocks
#
# `engine.kv_map()` tells who holds which block. Five requests: four ask about the same text, one about another. The text's
# blocks are there once for all four. Afterwards nobody holds anything, and what was computed stays to be found again until
# its block is needed.


# %%
def picture():
    """A number for each block: 0 free, 1 cached, 2 shared, 3 and up: held by one sequence."""
    now = engine.kv_map()
    (group,) = now.groups
    cells = np.array(
        [2 if holders > 1 else 1 if is_cached else 0 for holders, is_cached in zip(group.holders, group.is_cached, strict=True)]
    )
    for number, seq in enumerate(now.sequences):
        own = [block_id - 1 for block_id in seq.block_ids if group.holders[block_id - 1] == 1]
        cells[own] = 3 + number
    return cells


def run_to_end():
    """Step until nobody is left; the number of KV blocks held after each step."""
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.snapshot().num_kv_blocks_held)
    return held


shared, answers = fresh(480), SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
for number in range(5):
    prompt = [*shared, *fresh(30)] if number < 4 else fresh(400)
    engine.add_request(GenerationRequest(request_id=RequestId(f"map-{number}"), prompt_token_ids=tuple(prompt), params=answers))
pictures, moments = {}, {2: "first prompt", 5: "all prompts", 5 + ANSWER_TOKENS // 2: "answers"}
for step in range(1, max(moments) + 1):
    engine.step()
    if step in moments:
        pictures[moments[step]] = picture()
run_to_end()
pictures["afterwards"] = picture()

# %%
colors = ["#f2f2f2", "#b9d3ea", "#223355", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee"]
names = ["free", "cached", "shared", *(f"only request {number}" for number in range(1, 6))]
figure, panels = plt.subplots(1, len(pictures), figsize=(3 * len(pictures), 3.2), layout="constrained")
for axes, (name, cells) in zip(panels, pictures.items(), strict=True):
    axes.imshow(cells.reshape(16, 20), cmap=ListedColormap(colors), vmin=-0.5, vmax=len(colors) - 0.5)
    axes.set_xticks(np.arange(-0.5, 20), minor=True)
    axes.set_yticks(np.arange(-0.5, 16), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", bottom=False, left=False, labelbottom=False, labelleft=False)
    axes.set_title(f"{name}: {int((cells >= 2).sum())} of {cells.size} held", fontsize=10)
figure.legend([Patch(color=color) for color in colors], names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## A conversation grows
#
# Each turn sends the whole conversation again. Without a cache the time to the first token would grow with it; with one only
# the new message is computed, and the answer before it, which was computed when it was written, is found as well.

# %%
QUESTIONS = (
    "I want to grow vegetables. What should I begin with?",
    "The ground is heavy clay. What can I do about that?",
    "How much compost do two beds of three square metres need?",
    "When should I sow tomatoes, and when can I pick them?",
    "Something eats small holes into my radishes. What helps?",
    "How often should I water the beds during the summer?",
    "We are away for two weeks in August. What about the garden?",
    "What does crop rotation mean for only two beds?",
    "What can I still sow in September?",
    "How do I keep seeds of this year's beans?",
    "How much space does a pumpkin need?",
    "Sum up what I should do in the first spring.",
)
messages, turns = [], []
for question in QUESTIONS[:TURNS]:
    messages.append({"role": "user", "content": question})
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32))
    messages.append({"role": "assistant", "content": output.outputs[0].text})
    turns.append((len(output.prompt_token_ids), output.num_cached_tokens, 1e3 * output.timings.time_to_first_token_seconds))

# %%
num_prompt, num_cached, milliseconds = (np.array(column) for column in zip(*turns, strict=True))
numbers = np.arange(1, len(turns) + 1)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.bar(numbers, num_cached, color="#b9d3ea", label="found in the cache")
left.bar(numbers, num_prompt - num_cached, bottom=num_cached, color="#ee6677", label="computed")
left.set(
    xlabel="turn", ylabel="tokens of the prompt", title=f"{100 * num_cached.sum() / num_prompt.sum():.0f} % of all prompt tokens found"
)
left.legend(frameon=False)
right.plot(numbers, milliseconds, marker="o", color="#223355")
right.set(xlabel="turn", ylabel="ms", ylim=(0, None), title="Time to the first token")
for axes in (left, right):
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
plt.show()
assert (num_cached[1:] > 0).all()

# %% [markdown]
# ## Swap or compute again
#
# A sequence that must give up its blocks can take them to host memory and back, or have its tokens computed a second time.
# Computing grows with every token, and a little faster than that; a copy grows by the bytes. The engine measures both when it
# starts and says from which length on copying is cheaper. The same choice is made for a cached prompt in host memory.
#
# Below, a prompt is computed, pushed off the device and asked for again. Here copying is to happen at any length.


# %%
def evict():
    """Push every cached block off the device, as other prompts would; seconds."""
    started = time.perf_counter()
    (pool,) = engine.scheduler.pools.pools
    pool.release(pool.allocate(pool.num_available))
    engine.runner.move_blocks(engine.scheduler.take_moves())
    return time.perf_counter() - started


def first_token(prompt):
    """Seconds from the request to its first token."""
    return llm.generate([prompt], greedy)[0].timings.time_to_first_token_seconds


stated = tiers.limits
print("copying costs less than computing from this many tokens on, or never:", stated.min_swap_tokens or "never")
tiers.limits = replace(stated, min_fetch_tokens=0, min_swap_tokens=0)
computed, fetched, swapped = [], [], []
for length in LENGTHS:
    rounds = []
    for _ in range(REPEATS):
        prompt = fresh(length + 1)  # one more: the last token is computed in any case
        evict()
        cold, out, back = first_token(prompt), evict(), first_token(prompt)
        rounds.append((cold, back, out + back))
    for values, column in zip((computed, fetched, swapped), zip(*rounds, strict=True), strict=True):
        values.append(1e3 * statistics.median(column))

# %%
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.loglog(LENGTHS, computed, marker="o", color="#ee6677", label="compute again")
axes.loglog(LENGTHS, swapped, marker="o", color="#223355", label="swap: out and back")
axes.loglog(LENGTHS, fetched, marker="o", color="#4477aa", linestyle="--", label="only back, as for a cached prompt")
if stated.min_swap_tokens is not None:
    axes.axvline(
        stated.min_swap_tokens, color="#228833", linestyle=":", label=f"break-even stated at start: {stated.min_swap_tokens} tokens"
    )
axes.set(xlabel="tokens", ylabel="ms to the next token", title="Coming back after a preemption")
axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS], minor=False)
axes.minorticks_off()
axes.yaxis.set_major_formatter(ScalarFormatter())
axes.legend(frameon=False, fontsize=9)
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## The tiers
#
# The same prompt from nowhere, from the device, from host memory, and from disk. What is on disk outlives the process: a long
# system prompt is computed once in the machine's life.

# %%
hits = lambda: np.array([getattr(tiers.counters, f"num_hit_tokens_{tier}") for tier in ("device", "host", "disk")])  # noqa: E731
latencies, origins = {"computed": [], "device": [], "host": [], "disk": []}, {}
for _ in range(REPEATS):
    evict()
    prompt = fresh(PROMPT_TOKENS + 1)
    for tier in latencies:
        if tier == "device":
            first_token(prompt)  # what is found for the first time is copied to disk meanwhile, which would be timed too
        if tier in ("host", "disk"):
            evict()
        if tier == "disk":
            first_token(fresh(PROMPT_TOKENS + 1))  # another prompt takes its place, first on the device and then on the host
            evict()
        before = hits()
        latencies[tier].append(1e3 * first_token(prompt))
        origins[tier] = hits() - before
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
medians = [statistics.median(values) for values in latencies.values()]
bars = axes.barh(list(latencies), medians, color=["#ee6677", "#223355", "#4477aa", "#b9d3ea"])
axes.bar_label(bars, [f"{value:,.0f} ms" for value in medians], padding=4)
axes.set(xlabel="ms to the first token", xlim=(0, 1.15 * max(medians)), title=f"A prompt of {PROMPT_TOKENS} tokens")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
plt.show()
assert [int(origins[tier].argmax()) for tier in ("device", "host", "disk")] == [0, 1, 2], origins

# %% [markdown]
# ## Several answers to one question
#
# Eight answers hold the prompt's blocks once and only their own tokens eight times; the block that the prompt fills in part is
# copied. `n` in SamplingParams does this, and so does `llm.fork`, the base of beam and tree search.

# %%
question = fresh(330)
most_held = {}
for n in (1, 2, 4, 8):
    params = SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    engine.add_request(GenerationRequest(request_id=RequestId(f"best-of-{n}"), prompt_token_ids=tuple(question), params=params))
    most_held[n] = max(run_to_end())
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(list(most_held), [n * most_held[1] for n in most_held], marker="o", linestyle="--", color="#bbbbbb", label="without sharing")
axes.plot(list(most_held), list(most_held.values()), marker="o", color="#223355", label="held")
for n, held in most_held.items():
    axes.annotate(f"{held}", (n, held), textcoords="offset points", xytext=(0, 7), ha="center")
axes.set(xlabel="answers", ylabel="blocks", ylim=(0, None), title=f"A prompt of {len(question)} tokens, answers of {ANSWER_TOKENS}")
axes.set_xticks(list(most_held))
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()
assert most_held[8] < 4 * most_held[1]

# %% [markdown]
# What has been counted meanwhile: hits by tier, and that nothing was lost.

# %%
snapshot = engine.snapshot()
print(f"{snapshot.num_prefix_query_tokens:,} prompt tokens looked up; found on the device {snapshot.num_hit_tokens_device:,},")
print(f"in host memory {snapshot.num_hit_tokens_host:,}, on disk {snapshot.num_hit_tokens_disk:,}")
assert snapshot.num_kv_blocks_held == 0
assert snapshot.num_kv_blocks_free + snapshot.num_kv_blocks_cached == snapshot.num_kv_blocks_total
engine.scheduler.check()
llm.close()
folder.cleanup()
