"""A conversation of 20 turns: does the time to the first token grow with the history?"""

from __future__ import annotations

from typing import Any

from jaxinfer import LLM, SamplingParams

from .bench import FLOPS_PER_PAIR, FLOPS_PER_TOKEN, SMALL_POOL, Bench, greedy, median

ANSWER_TOKENS = 32
WANTED_GROWTH = 1.5
EARLY = slice(1, 6)
LATE = slice(-5, None)
OFF_TURNS = (2, 8, 14, 20)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve")
QUESTIONS = (
    "I am planning a small vegetable garden behind my house. What should I think about before I begin to dig the first bed?",
    "The ground is heavy clay and stays wet for days after rain. How can I make it better for growing vegetables?",
    "How much compost would I need for two beds that are each three metres long and one metre wide?",
    "Which vegetables are the easiest for somebody who has never grown anything before, and which are better left alone?",
    "I would like to grow tomatoes. When should I sow them, and how long does it take until I can pick any?",
    "My neighbour says that tomatoes must be pruned every week. Is that true, and what happens if I simply do not?",
    "Something has been eating small round holes into the leaves of my radishes. What could it be and what helps?",
    "Are there plants that keep insects away when they grow next to the vegetables, or is that only a story?",
    "How often should I water the beds in summer, and is it better to do it in the morning or in the evening?",
    "We will be away for two weeks in August. How can the garden survive without anybody who waters it?",
    "I have read about crop rotation. What does it mean for only two beds, and does it matter in the second year?",
    "Can I leave the roots of old plants in the ground, or must everything be pulled out in the autumn?",
    "What can still be sown in September so that the beds are not empty during the whole winter?",
    "Is it worth building a cold frame from old windows? What would I be able to grow in it and from when on?",
    "How do I keep seeds from this year's beans so that I can sow them again in the next spring?",
    "My children want to grow pumpkins. How much space does a single plant take, and does it need much care?",
    "The pumpkins flower but the small fruits turn yellow and fall off. What am I doing wrong with them?",
    "Which herbs come back every year by themselves, and which ones would I have to sow again each spring?",
    "Could I keep a few chickens beside the garden, and would they help with slugs or rather eat the salad?",
    "Please sum up in three sentences what I should do in the first spring, based on all we have talked about.",
)


def floor(bench: Bench) -> dict[str, Any]:
    """A turn computes its own 75 tokens or so, whatever stands before them; what grows is the attention's part."""
    num_new = 75
    seconds = {turn: bench.machine.prefill_seconds(num_new, (turn - 1) * num_new) for turn in (4, 18)}
    share = 18 * num_new * FLOPS_PER_PAIR / FLOPS_PER_TOKEN
    return {"seconds_on": seconds, "growth_on": seconds[18] / seconds[4], "attention_flops_per_token_at_turn_18": share}


def measure(bench: Bench) -> dict[str, Any]:
    turns = 8 if bench.is_small else len(QUESTIONS)
    llm = bench.start(SMALL_POOL, prefix_caching="on")
    rounds = [converse(llm, turns, name) for name in NAMES[: bench.repeats]]
    llm.close()
    prompts, figures = rounds[0][0], rounds[0][1] | {"all_ttft_seconds": [round_figures["ttft_seconds"] for _, round_figures in rounds]}
    # The least disturbed of each turn: an answer is measured once a conversation, and a first token takes a tenth of a second.
    figures["ttft_seconds"] = [min(turn) for turn in zip(*figures["all_ttft_seconds"], strict=True)]
    bench.tell(f"  on:  {[round(1e3 * seconds) for seconds in figures['ttft_seconds']]} ms")
    llm = bench.start(SMALL_POOL, prefix_caching="off", host_kv_bytes=0)
    off_turns = [turn for turn in OFF_TURNS if turn <= turns]
    off = [greedy(llm, [prompts[turn - 1]], 1)[0].timings.time_to_first_token_seconds for turn in off_turns]
    llm.close()
    bench.tell(f"  off: {[round(1e3 * seconds) for seconds in off]} ms at turns {off_turns}")
    figures |= {"off_turns": off_turns, "off_ttft_seconds": off}
    early, late = median(figures["ttft_seconds"][EARLY]), median(figures["ttft_seconds"][LATE])
    figures |= {"early_seconds": early, "late_seconds": late, "growth": late / early}
    figures["holds"] = {f"flat within {WANTED_GROWTH:g} times": figures["growth"] <= WANTED_GROWTH}
    return figures


def converse(llm: LLM, turns: int, name: str) -> tuple[list[list[int]], dict[str, Any]]:
    """Ask and answer in turn, each time with the whole conversation as the prompt: the prompts, and their figures.

    The system prompt has a name in it, so that conversations share nothing.
    """
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    messages = [{"role": "system", "content": f"{name} is an assistant who knows a lot about gardens."}]
    figures: dict[str, Any] = {"ttft_seconds": [], "prompt_tokens": [], "cached_tokens": []}
    prompts = []
    for question in QUESTIONS[:turns]:
        messages.append({"role": "user", "content": question})
        output = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        prompts.append(list(output.prompt_token_ids))
        figures["ttft_seconds"].append(output.timings.time_to_first_token_seconds)
        figures["prompt_tokens"].append(len(output.prompt_token_ids))
        figures["cached_tokens"].append(output.num_cached_tokens)
    return prompts, figures
