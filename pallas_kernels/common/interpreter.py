"""Pallas' GPU interpreter, with what our kernels use and it lacks, and with a count of the bytes that a kernel moves.

It runs a kernel as it is compiled: copies, barriers and matrix instructions are the kernel's own. Added here:

- `wgmma` with a register operand, `ACC` stores, and `pl.run_state` over accumulators (jax 0.11.2 raises or misreads them);
- for the race detector, `wgmma` is asynchronous: its shared-memory operands are read at any time between the instruction and
  the wait for it, through the async proxy. Without that a stage could be refilled under a running product unnoticed;
- its callbacks get numpy arrays, which is most of their time;
- bytes of global memory that copies and direct accesses really touch, see `Run`.

This leans on jax internals of the pinned version; everything that does stands in this file.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import discharge
from jax.experimental.pallas import mosaic_gpu as plgpu

_Key = memory.HostAllocationKey


@dataclass(slots=True)
class Run:
    """What the kernels did that ran inside one `interpreted`.

    Attributes:
        bytes_read, bytes_written: of global memory: copies to and from shared memory, inside the array's bounds, and direct
            reads and writes by a warpgroup. What a kernel reads twice counts twice, caches or not.
        has_races: whether two accesses, one of them a write, were ordered by nothing.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    has_races: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, *, read: int = 0, written: int = 0) -> None:
        """Add to the bytes; kernels' threads call it at once."""
        with self._lock:
            self.bytes_read += read
            self.bytes_written += written


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[Run]:
    """Interpret the kernels that are traced and run inside with uninitialized memory full of NaN; for tests.

    Inside, call functions that were not jitted before, for a trace keeps the way in which it runs.

    Yields:
        The bytes as they are counted; `has_races` is there at the end.
    """
    extend()
    run = Run()
    _RUNS.append(run)
    # Many copies are in flight at once, and two that share a clock would seem ordered.
    params = plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan", num_tma_threads_per_device=16)
    try:
        with plgpu.force_gpu_interpret_mode(params):
            yield run
        run.has_races = detect_races and gpu_callbacks._races is not None and gpu_callbacks.get_races().races_found
    finally:
        _RUNS.remove(run)
        gpu_callbacks.reset_gpu_interpret_mode_state()


@functools.cache
def extend() -> None:
    """Teach jax's interpreter what this file adds, once and for good: what it could do before it does as before."""
    jaxpr_interpret.JaxprInterpreter.interpret = _interpret
    gpu_callbacks.copy_gmem_to_smem = _counted(gpu_callbacks.copy_gmem_to_smem, "src", "read")
    gpu_callbacks.copy_smem_to_gmem = _counted(gpu_callbacks.copy_smem_to_gmem, "dst", "written")
    gpu_callbacks._get = _counted_access(gpu_callbacks._get, "read")
    gpu_callbacks._swap = _counted_access(gpu_callbacks._swap, "written")
    callback.io_callback_impl = _run_callback
    memory._to_int = _to_int


_RUNS: list[Run] = []
"""Those that are open; the interpreter's callbacks come from threads of their own and know no context."""


# ---- speed -------------------------------------------------------------------------------------------------------------

_original_run_callback = callback.io_callback_impl
_original_to_int = memory._to_int


def _run_callback(*args: Any, callback: Any, **options: Any) -> Any:
    """As jax's, but the interpreter gets numpy arrays as they come: a kernel takes a fifth of the time.

    jax makes an array on the device of each, and a callback of the interpreter has a dozen, most of them single numbers.
    """
    function = callback.callback_func
    while isinstance(function, functools.partial):
        function = function.func
    if not function.__module__.startswith(("jax._src.pallas.", __name__)):
        return _original_run_callback(*args, callback=callback, **options)
    return jax.tree.map(np.asarray, callback(*args))


def _to_int(x: Any) -> Any:
    return x.item() if isinstance(x, np.ndarray) else _original_to_int(x)


# ---- bytes -------------------------------------------------------------------------------------------------------------


def _count(key_array: Any, transforms: Any, kind: str) -> None:
    key = _Key.from_array(key_array)
    if not _RUNS or key.memory_space_id != memory.get_memory_space_idx(gpu_core.MemorySpace.GMEM):
        return
    shared = gpu_callbacks._get_shared_memory()
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    buffer = shared.buffer_shape_and_dtype(key)
    inside = gpu_callbacks.interpret_utils.clip_range_to_shape(shared.access(key, transforms).range, tuple(buffer.shape))
    if inside is None:
        return
    lengths = [len(range(s.start, s.stop, s.step or 1)) if isinstance(s, slice) else 1 for s in inside]
    for run in _RUNS:
        run.count(**{kind: math.prod(lengths) * np.dtype(buffer.dtype).itemsize})


def _counted(original: Any, side: str, kind: str) -> Any:
    def run(**arguments: Any) -> Any:
        _count(arguments[f"{side}_allocation_key_as_array"], arguments[f"{side}_transforms"], kind)
        return original(**arguments)

    return run


def _counted_access(original: Any, kind: str) -> Any:
    def run(token: Any, location: Any, thread: Any, key: Any, transforms: Any, *rest: Any, **options: Any) -> Any:
        if thread is not None:  # else the interpreter itself brings arguments in and results out
            _count(key, transforms, kind)
        return original(token, location, thread, key, transforms, *rest, **options)

    return run


# ---- what jax's interpreter lacks --------------------------------------------------------------------------------------

_original_interpret = jaxpr_interpret.JaxprInterpreter.interpret


def _interpret(self: Any, jaxpr: Any, token: Any, *args: Any) -> Any:
    """Equation by equation: ours here, all others by jax's own method on a jaxpr of that one equation."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, jex_core.Literal) else env[var]

    for eqn in jaxpr.eqns:
        rule = _RULES.get(eqn.primitive)
        if rule is not None:
            token, results = rule(self, eqn, token, [read(var) for var in eqn.invars])
        else:
            inputs = list(dict.fromkeys(var for var in eqn.invars if not isinstance(var, jex_core.Literal)))
            names = jaxpr.debug_info._replace(arg_names=("",) * len(inputs), result_paths=("",) * len(eqn.outvars))
            single = jaxpr.replace(constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn], debug_info=names)
            token, results = _original_interpret(self, single, token, *[env[var] for var in inputs])
        env.update(zip(eqn.outvars, results, strict=True))
    return token, [read(var) for var in jaxpr.outvars]


def _call(self: Any, run: Any, result: Any, **arguments: Any) -> Any:
    return callback.io_callback(
        gpu_callbacks.fail_on_exception(run), result, mesh_location=self.mesh_location, thread=self.thread, **arguments
    )


def _wgmma_rule(self: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    acc, a, b, *leaves = values
    empty = jax.tree.structure([])
    names = ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree")
    trees = jax.tree_util.treedef_tuple([eqn.params[name] or empty for name in names])
    acc_at, a_at, b_at = jax.tree.unflatten(trees, leaves)
    acc, acc_at = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, acc, acc_at)
    is_reference = not isinstance(eqn.invars[1].aval, jax.core.ShapedArray)
    if is_reference:
        a, a_at = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, a, a_at)
    b, b_at = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, b_at)
    run = functools.partial(_wgmma, is_reference=is_reference, source_info=eqn.source_info)
    shape = gpu_callbacks.TOKEN_SHAPE_DTYPE
    return _call(self, run, shape, token=token, acc=acc, acc_at=acc_at, a=a, a_at=a_at, b=b, b_at=b_at), []


def _wgmma(*, token, mesh_location, thread, acc, acc_at, a, a_at, b, b_at, is_reference, source_info):
    shared = gpu_callbacks._get_shared_memory()
    log = memory.GPULoggingInfo(mesh_location, thread, source_info)
    reads: list[tuple[Any, Any]] = []

    def place(key: Any, transforms: Any) -> tuple[Any, Any]:
        key = _Key.from_array(key)
        return key, shared.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))

    def operand(key: Any, transforms: Any) -> np.ndarray:
        key, access = place(key, transforms)
        value, _, _ = shared.get_buffer_content(key, access, thread, logging_info=log)
        assert value is not None, "an operand of wgmma lies outside its buffer"
        reads.append((key, access))
        return value

    left = operand(a, a_at) if is_reference else np.asarray(a)
    right = operand(b, b_at)
    acc_key, acc_access = place(acc, acc_at)
    total, _, _ = shared.get_buffer_content(acc_key, acc_access, thread, logging_info=log)
    assert total is not None, "the accumulator is not there"
    with np.errstate(all="ignore"):  # the device raises nothing where rows that nobody reads are not finite
        product = np.matmul(left.astype(total.dtype), right.astype(total.dtype))
    shared.store_buffer_content(acc_key, acc_access, total + product, thread, logging_info=log)
    if shared.detect_races:
        # As a thread of its own: its reads are ordered with nothing that follows until this thread waits.
        clock = shared.incr_clock(thread)
        clock.inc(shared.get_next_tma_thread_id())
        for key, access in reads:
            gpu_callbacks.get_races().check_read(thread, clock.async_smem_clock.copy(), key, access, source_info=source_info)
        _pending(shared).setdefault(thread, []).append(clock)
    return token


def _pending(shared: Any) -> dict[Any, list[Any]]:
    """Clocks of the products that each thread has not waited for, oldest first; they live and die with the kernel's memory."""
    return shared.__dict__.setdefault("_pending_wgmma", {})


def _wait(*, token, mesh_location, thread, num_left):
    shared = gpu_callbacks._get_shared_memory()
    pending = _pending(shared).get(thread, [])
    while len(pending) > num_left:
        with shared.lock:
            shared.clocks[thread].update(pending.pop(0))
    return token


def _wait_rule(self: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    run = functools.partial(_wait, num_left=eqn.params["n"])
    return _call(self, run, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token), []


def _deref_rule(self: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    if eqn.params["wait_n"] is not None:
        token = _call(self, functools.partial(_wait, num_left=eqn.params["wait_n"]), gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token)
    token, value = self._interpret_wgmma_accumulator_deref_p(eqn, token, lambda: values)
    return token, [value]


def _store(*, token, mesh_location, thread, key, value, source_info):
    shared = gpu_callbacks._get_shared_memory()
    place = _Key.from_array(key)
    log = memory.GPULoggingInfo(mesh_location, thread, source_info)
    shared.store_buffer_content(place, shared.access(place, ()), np.asarray(value), thread, logging_info=log)
    return token


def _store_rule(self: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    run = functools.partial(_store, source_info=eqn.source_info)
    return _call(self, run, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, key=values[0], value=values[1]), [
        values[1]
    ]  # a result that nobody reads


def _run_state_rule(self: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    """Each value becomes a buffer in registers, the body runs on the buffers, and what they hold at the end is the result."""
    is_value = [isinstance(var.aval, jax.core.ShapedArray) for var in eqn.invars]
    space = memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
    keys = []
    for value, is_here in zip(values, is_value, strict=True):
        if is_here:
            token, request = gpu_callbacks.call_make_allocation_request_array(token=token, compute_unit=self.thread, memory_space_id=space)
            token, value = gpu_callbacks.call_allocate_buffer(token, self.mesh_location, self.thread, request, value, eqn.source_info)
        keys.append(value)
    token, _ = self.interpret(eqn.params["jaxpr"], token, *keys)
    token = _call(self, functools.partial(_wait, num_left=0), gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token)
    results = []
    for var, key, is_here in zip(eqn.outvars, keys, is_value, strict=True):
        value = key
        if is_here:
            run = functools.partial(gpu_callbacks.wgmma_accumulator_deref.__wrapped__, wait_n=0, source_info=eqn.source_info)
            shapes = (gpu_callbacks.TOKEN_SHAPE_DTYPE, var.aval)
            token, value = _call(self, run, shapes, token=token, acc_allocation_key_as_array=key)
            token = gpu_callbacks.call_deallocate_buffer(token, self.mesh_location, self.thread, key, eqn.source_info)
        results.append(value)
    return token, results


def _inline_rule(self: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    """Inline code that says what it computes: see `registers.py`."""
    model = getattr(eqn.params["mgpu_fn"], "model", None)
    if model is None:
        return self._interpret_inline_mgpu_p(eqn, token, lambda: values)
    return token, jax.tree.leaves(model(*values))


_RULES = {
    primitives.inline_mgpu_p: _inline_rule,
    primitives.wgmma_ref_p: _wgmma_rule,
    primitives.wgmma_wait_p: _wait_rule,
    primitives.wgmma_accumulator_deref_p: _deref_rule,
    primitives.wgmma_accumulator_store_p: _store_rule,
    discharge.run_state_p: _run_state_rule,
}
