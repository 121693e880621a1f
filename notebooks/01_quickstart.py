# %% [markdown]
# # Quickstart
#
# A small language model, SmolLM2-135M, on the processor of this machine: complete, chat, stream, look at
# probabilities, and see what batching is worth.
#
# It needs `make setup`; the weights (93 MB) come on first use.

# %% [markdown]
# Three sizes that decide how long this notebook takes. Larger ones give smoother figures.

# %% tags=["parameters"]
MAX_TOKENS = 48  # longest answer
MEASURED_TOKENS = 96  # tokens of every answer in the measurement
CONCURRENCIES = (1, 2, 4, 8, 16, 32)  # requests at once in the measurement

# %%
import math
import time

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from jaxinfer import LLM, SamplingParams

# %% [markdown]
# ## Load
#
# `LLM` reads the weights and compiles every program it will ever need, so nothing is compiled later. The first start
# takes a minute or so; afterwards the programs come from a cache. int8 weights are the fast ones on a CPU.

# %%
llm = LLM(
    model="smollm2-135m",
    quantization="int8",
    max_num_seqs=32,  # sequences running at once
    max_num_batched_tokens=128,  # tokens in one step
    max_model_len=512,  # prompt and answer together
)
startup = llm.startup
print(f"ready in {startup.total_seconds:.1f} s, {startup.num_programs} programs")

# %% [markdown]
# ## Complete
#
# `generate` continues text. Temperature 0 always takes the most probable token, so the answer is the same every time.

# %%
greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
output = llm.generate("The capital of France is", greedy)[0]
print(output.prompt + output.outputs[0].text)

# %% [markdown]
# A result carries more than text: the tokens, why it ended, and how long it took.

# %%
answer = output.outputs[0]
print(f"{len(output.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} new ones, ended by {answer.finish_reason.value!r}")
print(f"first token after {1000 * output.timings.time_to_first_token_seconds:.0f} ms, all after {output.timings.end_to_end_seconds:.2f} s")

# %% [markdown]
# ## Chat
#
# `chat` puts a conversation through the model's chat template. Given several conversations it answers them together.

# %%
conversation = [{"role": "user", "content": "Why is the sky blue? One sentence."}]
reply = llm.chat(conversation, greedy)
print(reply.outputs[0].text)

# %% [markdown]
# ## Stream
#
# `stream` and `stream_chat` give each piece of text as soon as it is there. Leaving the loop early ends the request.

# %%
for delta in llm.stream_chat([{"role": "user", "content": "Tell me a very short story about a fox."}], greedy):
    for piece in delta.outputs:
        print(piece.text, end="", flush=True)
print()

# %% [markdown]
# ## Look at probabilities
#
# With `logprobs=3` every position also lists its three most probable tokens. They are the model's own, before
# temperature and penalties. Watch the model become sure: ten blocks are certainty.

# %%
looked_at = llm.generate("The largest planet is", SamplingParams(temperature=0.0, max_tokens=8, logprobs=3))[0].outputs[0]


# %%
def shown(token):
    """A candidate as its text, its probability and a bar of ten."""
    probability = math.exp(token.logprob)
    return f"{llm.tokenizer.token_text(token.token_id)!r:<12} {probability:4.0%} {'█' * round(10 * probability)}"


table = Table("chosen", "first", "second", "third")
for position in looked_at.logprobs:
    table.add_row(repr(llm.tokenizer.token_text(position.chosen.token_id)), *map(shown, position.top))
Console(width=110, markup=False).print(table)

# %% [markdown]
# ## Many at once
#
# A list of conversations, or of prompts, runs as one continuous batch: sequences join when there is room and leave
# when they end.

# %%
things = ["rivers", "the moon", "bread", "violins", "winter", "lighthouses", "chess", "bees"]
wishes = ["Write a short poem about", "Tell me a fact about", "Ask me a question about", "Explain to a child what is special about"]
questions = [f"{wish} {thing}." for thing in things for wish in wishes]

started = time.monotonic()
replies = llm.chat(
    [[{"role": "user", "content": question}] for question in questions],
    SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=MAX_TOKENS),
    show_progress=False,
)
elapsed_seconds = time.monotonic() - started

num_tokens = sum(len(reply.outputs[0].token_ids) for reply in replies)
print(f"{len(replies)} answers, {num_tokens} tokens in {elapsed_seconds:.1f} s")
for question, reply in list(zip(questions, replies, strict=True))[:4]:
    print(f"- {question} {' '.join(reply.outputs[0].text.split())[:90]} ...")

# %% [markdown]
# ## The same seed, the same tokens, in any company
#
# A request with a seed does not depend on what else runs: alone or among 31 others, it draws the same tokens.

# %%
seeded = SamplingParams(temperature=0.7, seed=42, max_tokens=MAX_TOKENS)
alone = llm.generate("Once upon a time", seeded)[0].outputs[0]
crowd = [SamplingParams(temperature=0.7, max_tokens=MAX_TOKENS) for _ in range(31)]
in_company = llm.generate([*questions[:31], "Once upon a time"], [*crowd, seeded], show_progress=False)[-1].outputs[0]

assert alone.token_ids == in_company.token_ids
print("Once upon a time" + alone.text)

# %% [markdown]
# ## What batching is worth
#
# Each step reads all weights once, for one sequence or for thirty-two. So more requests at once give more tokens per
# second, until the arithmetic becomes the limit. `ignore_eos` makes every answer equally long.

# %%
measured = SamplingParams(temperature=0.0, max_tokens=MEASURED_TOKENS, ignore_eos=True)
tokens_per_second = []
for concurrency in CONCURRENCIES:
    started = time.monotonic()
    outputs = llm.generate(questions[:concurrency], measured, show_progress=False)
    elapsed_seconds = time.monotonic() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    tokens_per_second.append(num_tokens / elapsed_seconds)

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(CONCURRENCIES, tokens_per_second, marker="o")
for concurrency, speed in zip(CONCURRENCIES, tokens_per_second, strict=True):
    axes.annotate(f"{speed:.0f}", (concurrency, speed), textcoords="offset points", xytext=(0, 7), ha="center")
axes.set_xscale("log", base=2)
axes.set_xticks(CONCURRENCIES, [str(concurrency) for concurrency in CONCURRENCIES])
axes.set_ylim(0, 1.15 * max(tokens_per_second))
axes.set_xlabel("requests at once")
axes.set_ylabel("tokens per second")
axes.set_title("SmolLM2-135M, int8")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## What the engine counted
#
# The engine keeps count of everything it does. Nothing was compiled after the start, and with no request left nobody
# holds a KV block; some are kept in case their prompts come again.

# %%
snapshot = llm.engine.snapshot()
print(f"{snapshot.num_steps} steps, {snapshot.num_prompt_tokens} prompt tokens, {snapshot.num_generation_tokens} tokens generated")
print(f"{snapshot.step_seconds:.1f} s in steps, {snapshot.scheduler_seconds:.2f} s in scheduling")
print(f"ended by: {snapshot.finished_by_reason}")
print(f"{snapshot.num_recompiles} programs compiled after the start")
print(f"{snapshot.num_kv_blocks_held} of {snapshot.num_kv_blocks_total} KV blocks held, {snapshot.num_kv_blocks_cached} cached")

assert snapshot.num_recompiles == 0
assert snapshot.num_kv_blocks_held == 0

# %%
llm.close()
