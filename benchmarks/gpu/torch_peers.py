"""Part `torch`: scaled_dot_product_attention and _int_mm at the same shapes; a process of its own, for torch wants the memory too."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.peers import dense_shapes, not_dense
from benchmarks.gpu.rows import Rows
from pallas_kernels.common.served import Case, cases

NUM_REPLAYS = 20
MIN_INT_MM_ROWS = 17
"""_int_mm refuses fewer."""


def measure(rows: Rows, *, is_tiny: bool) -> None:
    """A CUDA graph of calls over arguments that take turns, replayed."""
    if importlib.util.find_spec("torch") is None:
        rows.add(contender="torch", reason="not here: torch is not installed")
        return
    import torch

    if not torch.cuda.is_available():
        rows.add(contender="torch", reason="not here: torch sees no CUDA device")
        return
    for operation, name, prepare in (("paged_attention", "torch_sdpa", attention), ("int8_matmul", "torch_int_mm", product)):
        for case in cases(operation, is_tiny=is_tiny):
            prepared = prepare(torch, case) if case.is_compared else None
            if prepared is not None and not rows.is_out_of_time(needs=3, what=f"{name} {case.name}"):
                with rows.row(operation=operation, case=case.name, contender=name) as row:
                    row["microseconds"] = seconds(torch, *prepared, case.floor_bytes) * 1e6


def attention(torch: Any, case: Case) -> tuple[Callable[[], list[Any]], Callable[..., Any]] | None:
    """Arguments and the call; None where it is other work."""
    if not_dense(case.sizes) is not None:
        return None
    shapes = [(shape[0], shape[2], shape[1], shape[3]) for shape in dense_shapes(case.sizes)]
    attend = torch.nn.functional.scaled_dot_product_attention
    make = lambda: [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]  # noqa: E731
    return make, partial(attend, is_causal=shapes[0][2] > 1, enable_gqa=True)


def product(torch: Any, case: Case) -> tuple[Callable[[], list[Any]], Callable[..., Any]] | None:
    """Arguments and the call, int32 without scales."""
    num_rows, num_outputs, num_inputs = (case.sizes[name] for name in ("num_rows", "num_outputs", "num_inputs"))
    if num_rows < MIN_INT_MM_ROWS:
        return None
    integers = partial(torch.randint, -127, 128, device="cuda", dtype=torch.int8)
    return lambda: [integers((num_rows, num_inputs)), integers((num_outputs, num_inputs)).t()], torch._int_mm


def seconds(torch: Any, make: Callable[[], list[Any]], call: Callable[..., Any], floor_bytes: int) -> float:
    """Of one call."""
    sets = [make() for _ in range(max(1, min(8, 2**27 // floor_bytes + 1)))]
    with torch.cuda.stream(torch.cuda.Stream()):
        for arguments in sets * 2:
            call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in sets:
            call(*arguments)
    graph.replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / NUM_REPLAYS / len(sets)
