"""What the results say: a table, whether what is promised holds, pictures, one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Parts = dict[str, Any]
STORAGES = ("bfloat16", "int8_weight_only", "int8", "int4")
PER_OPERATION = ("numerics", "kernels")


def rows_of(parts: Parts, kind: str) -> Iterator[dict[str, Any]]:
    """Rows of the part of this name, or of the parts `<kind>_<operation>`."""
    return (
        row
        for name, part in parts.items()
        if name == kind or (kind in PER_OPERATION and name.startswith(f"{kind}_"))
        for row in part["rows"]
    )


def find(parts: Parts, kind: str, **fields: Any) -> dict[str, Any] | None:
    """The first row that has these values and no failure."""
    matching = (row for row in rows_of(parts, kind) if fields.items() <= row.items() and "failed" not in row and "reason" not in row)
    return next(matching, None)


def microseconds(row: dict[str, Any] | None) -> float | None:
    """Of the kernels where the profiler gave it, else of the wall."""
    return (row.get("kernel_microseconds") or row.get("microseconds")) if row is not None else None


# ---- what is promised ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Promise:
    """A figure and its bound; `measured` None: it is not there."""

    what: str
    at_least: float
    measured: float | None

    def row(self) -> dict[str, Any]:
        holds = None if self.measured is None else self.measured >= self.at_least
        return {"what": self.what, "at_least": self.at_least, "measured": self.measured, "holds": holds}


def judge(parts: Parts) -> list[dict[str, Any]]:
    """Every promise with its figure."""
    promises = [
        Promise(f"decode attention {case}: share of the copy's bandwidth", bound, _figure(parts, case, "share_of_bandwidth"))
        for case, bound in (("decode_32x2048", 0.7), ("decode_256x2048", 0.7), ("decode_32x512", 0.5), ("decode_256x256", 0.5))
    ]
    for kind, operation, num_rows, bound in (
        ("w8a16", "packed_matmul", 1, 1.5),
        ("w8a16", "packed_matmul", 16, 1.5),
        ("w8a16", "packed_matmul", 256, 0.9),
        ("w8a8", "int8_matmul", 256, 1.2),
    ):
        for layer in ("gate_up", "down"):
            case = f"{kind}_{layer}_{num_rows}"
            promises.append(Promise(f"{case}: times as fast as bfloat16", bound, _speedup(parts, operation, case)))
    decode = find(parts, "bfloat16", what="decode", rows=1)
    promises.append(Promise("one row of bfloat16: share of the copy's bandwidth", 0.65, decode and decode.get("share_of_bandwidth")))
    for num_rows in (1, 32, 256):
        profile = find(parts, "bfloat16", what="profile", rows=num_rows)
        share = profile.get("host_gap_share") if profile is not None else None
        promises.append(Promise(f"{num_rows} rows: share of a step without the host's gap", 0.9, None if share is None else 1 - share))
    compared = [row["ok"] for row in rows_of(parts, "numerics") if "ok" in row]
    failed = [row for row in rows_of(parts, "numerics") if "failed" in row]
    right = sum(compared) / (len(compared) + len(failed)) if compared or failed else None
    return [Promise("kernels' results within their limits: share of the specs", 1.0, right).row(), *(promise.row() for promise in promises)]


def _figure(parts: Parts, case: str, name: str) -> float | None:
    row = find(parts, "kernels", case=case, contender="mosaic")
    return row.get(name) if row is not None else None


def _speedup(parts: Parts, operation: str, case: str) -> float | None:
    ours = microseconds(find(parts, f"kernels_{operation}", case=case, contender="mosaic"))
    theirs = microseconds(find(parts, f"kernels_{operation}", case=case, contender="bfloat16_product"))
    return theirs / ours if ours and theirs else None


# ---- table ---------------------------------------------------------------------------------------------------------------------


def table(parts: Parts, judged: list[dict[str, Any]]) -> str:
    """For people: what was measured, then what of it holds."""
    lines = ["", f"{'operation':16s} {'case':32s} {'who':18s} {'us':>10s} {'kernels us':>10s} {'of copy':>8s} {'of peak':>8s}"]
    for row in [*rows_of(parts, "kernels"), *rows_of(parts, "torch")]:
        if "microseconds" in row:
            lines.append(
                f"{row['operation']:16s} {row['case']:32s} {row['contender']:18s} {row['microseconds']:10.1f} "
                f"{number(row.get('kernel_microseconds')):>10s} {percent(row.get('share_of_bandwidth')):>8s} "
                f"{percent(row.get('share_of_peak')):>8s}"
            )
        elif "contender" in row:
            reason = row.get("failed") or row.get("reason")
            lines.append(f"{row.get('operation', ''):16s} {row.get('case', ''):32s} {row['contender']:18s} {str(reason)[:90]}")
    lines += ["", f"{'weights':18s} {'what':10s} {'rows':>6s} {'ms':>9s} {'tokens/s':>10s} {'of copy':>8s} {'gap':>7s}"]
    for storage in STORAGES:
        lines += [_model_line(storage, row) for row in rows_of(parts, storage) if row.get("what") in ("decode", "prefill", "profile")]
    lines += ["", "promises" if judged else "at these sizes no promise is judged"]
    for promise in judged:
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}[promise["holds"]]
        lines.append(f"  {promise['what']:70s} >= {promise['at_least']:<5g} {number(promise['measured'], 3):>7s}  {verdict}")
    lines += ["", "parts"] + [f"  {name:28s} {part['status']}" for name, part in parts.items()]
    return "\n".join(lines)


def _model_line(storage: str, row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{storage:18s} {row['what']:10s} {row.get('rows', ''):>6} failed: {row['failed'][:90]}"
    milliseconds = row.get("step_milliseconds") or row.get("ttft_milliseconds")
    return (
        f"{storage:18s} {row['what']:10s} {row.get('rows', ''):>6} {number(milliseconds, 3):>9s} {number(row.get('tokens_per_second')):>10s} "
        f"{percent(row.get('share_of_bandwidth')):>8s} {percent(row.get('host_gap_share')):>7s}"
    )


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def last_line(results: dict[str, Any]) -> dict[str, Any]:
    """Short enough for one line: the promises, and which parts are whole."""
    counted = [promise["holds"] for promise in results["judged"]]
    return {
        "benchmark": results["benchmark"],
        "date": results["date"],
        "device": results["device"],
        "is_tiny": results["is_tiny"],
        "seconds": results["seconds"],
        "promises": {"hold": counted.count(True), "do_not_hold": counted.count(False), "not_measured": counted.count(None)},
        "parts": {name: part["status"] for name, part in results["parts"].items()},
    }


# ---- pictures --------------------------------------------------------------------------------------------------------------------


def draw(parts: Parts, folder: Path) -> list[str]:
    """Shares of the roofline of each kernel, and tokens per second of each kind of weights; file names, none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = []
    ours = [row for row in rows_of(parts, "kernels") if row.get("share_of_roofline") is not None]
    if ours:
        cases = list(dict.fromkeys((row["operation"], row["case"]) for row in ours))
        figure, axis = pyplot.subplots(figsize=(9, 1 + 0.22 * len(cases)), layout="constrained")
        for contender in dict.fromkeys(row["contender"] for row in ours):
            points = [
                (row["share_of_roofline"], cases.index((row["operation"], row["case"]))) for row in ours if row["contender"] == contender
            ]
            axis.plot(*zip(*points, strict=True), "o", label=contender)
        axis.set_yticks(range(len(cases)), [f"{operation} {case}" for operation, case in cases], fontsize=7)
        axis.set_xlim(0, 1.05)
        axis.set_xlabel("share of the roofline (measured copy bandwidth, datasheet's operations)")
        axis.invert_yaxis()
        axis.legend(frameon=False)
        figure.savefig(folder / "kernels.png", dpi=110)
        names.append("kernels.png")
    decodes = {name: [row for row in rows_of(parts, name) if row.get("what") == "decode" and "failed" not in row] for name in STORAGES}
    if any(decodes.values()):
        figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for storage, rows in decodes.items():
            if rows:
                axis.loglog([row["rows"] for row in rows], [row["tokens_per_second"] for row in rows], "o-", label=storage)
        axis.set_xlabel("rows")
        axis.set_ylabel("tokens per second")
        axis.legend(frameon=False)
        figure.savefig(folder / "decode.png", dpi=110)
        names.append("decode.png")
    return names
