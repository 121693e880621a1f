"""A subprocess that does some checks of one module, one after the other: MODULE ATTRIBUTE TIMEOUT_SECONDS OUTCOMES KEY..."""

from __future__ import annotations

import faulthandler
import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.check_gpu.outcome import Outcome, append_line

ROOT = Path(__file__).parents[2]
LONGEST_TEXT = 600


def said_by(error: BaseException) -> str:
    """An error in one line: what it says, and the deepest place of this project that it came through."""
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and text:
        return text[:LONGEST_TEXT]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    ours = [frame for frame in frames if "/.venv" not in frame.filename and Path(frame.filename) != Path(__file__)]
    place = f", at {Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}: {text[:LONGEST_TEXT]}{place}"


def run(module: str, attribute: str, key: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Figures and problems of one check."""
    found = importlib.import_module(module)
    if attribute not in ("KERNELS", "COPIED"):
        return dict(getattr(found, attribute)[key]()), ()
    name, _, device = key.partition("@")
    (check,) = [check for check in found.KERNELS if check.name == name]
    if attribute == "COPIED":
        counted = check.copied.count()
        return {"bytes": counted, "floor_bytes": check.copied.floor_bytes}, ()
    from tests.check_gpu.kernels import compile_and_hold

    return compile_and_hold(check, device)


def main() -> None:
    module, attribute, timeout, outcomes, *keys = sys.argv[1:]
    for key in keys:
        append_line(Path(outcomes), key, None)
        # A thread below Python: it ends the process also when a compiler never returns.
        faulthandler.dump_traceback_later(float(timeout), exit=True)
        began = time.perf_counter()
        try:
            figures, problems = run(module, attribute, key)
        except Exception as error:
            # The edge of the process: whatever a check raises is its outcome.
            figures, problems = {}, (said_by(error),)
        faulthandler.cancel_dump_traceback_later()
        append_line(Path(outcomes), key, Outcome(figures=figures, problems=problems, seconds=round(time.perf_counter() - began, 2)))


if __name__ == "__main__":
    main()
