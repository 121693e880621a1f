"""Progress of long work with bytes: a bar when stderr is a terminal, one line when it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def byte_progress(what: str, total_bytes: int) -> Generator[Callable[[int], None]]:
    """Show work on `total_bytes` bytes; gives a function to call with the number of bytes done so far."""
    if not sys.stderr.isatty():
        print(f"{what} ({total_bytes / 1e6:.0f} MB)", file=sys.stderr, flush=True)
        yield lambda done_bytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda done_bytes: progress.update(task, completed=done_bytes)
