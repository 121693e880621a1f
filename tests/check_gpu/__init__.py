"""What GPU code compiles to, checked without a GPU: `python -m tests.check_gpu [NAME...]`, or `make check-gpu`.

Every check runs in a subprocess with a timeout, as some inputs crash the compiler; two run at once. There are two kinds, both found by import:

**Kernels.** An operation's `pallas_kernels/<operation>/budgets.py` has `KERNELS: tuple[KernelCheck, ...]` (`pallas_kernels/common/budget.py`
says what a check consists of). Its name here is `<operation>.<check>`; several checks of one operation share a subprocess. A `budgets.py` is
imported by the command itself, which has no CUDA plugin: importing it must compute nothing.

    def decode(q, keys, values, tables, lengths):
        return mosaic.paged_attention(q, keys, values, tables, lengths)

    KERNELS = (
        KernelCheck(
            name="decode_bfloat16_128", run=decode, arguments=(ShapeDtypeStruct((64, 32, 128), jnp.bfloat16), ...),
            max_registers=168, max_shared_bytes=160_000, required=(r"wgmma.*bf16", r"cp\\.async\\.bulk\\.tensor"),
            floor_bytes=..., floor_flops=...,
        ),
    )

**Whole programs.** A module of this package whose name begins with `gate_` has `CHECKS: Mapping[str, Callable[[], Mapping[str, Any]]]`: each
callable compiles something (`pallas_kernels.deviceless.compiler`) and returns figures that JSON can hold, or raises AssertionError with a text
that says what was expected and what came out. Its name here is `<module without gate_>.<name>`. Each runs in a subprocess of its own, where
the CUDA plugin and ptxas are on the path and JAX_PLATFORMS is cpu. Modules may also have `TIMEOUT_SECONDS` (120 if not), and `NIGHTLY`, a
mapping like CHECKS that runs with `--nightly` only. They are imported by the command itself too: import jaxinfer inside the functions.

    def one_device() -> dict[str, Any]:
        mesh = topology_mesh("h200", {"tensor": 1})
        compiled = compile_on(mesh, step, arguments, donate_argnums=(1,))
        assert compiled.memory.temporaries <= LIMIT, f"temporaries: at most {LIMIT} bytes allowed, got {compiled.memory.temporaries}"
        return {"temp_bytes": compiled.memory.temporaries}

    CHECKS = {"llama3_8b_1xh200": one_device}

The last line is `N kernels compiled`: kernels that met their budgets on all their devices. Any failed check makes the exit status 1.
"""
