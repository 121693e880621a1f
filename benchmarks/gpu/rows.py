"""Results that survive whatever happens: the file is whole after every row."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Rows:
    """A part's rows in its file, and the time that the part has left."""

    def __init__(self, path: Path, seconds: float):
        self._path = path
        self._end = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def add(self, **row: Any) -> None:
        """Append a row and write them all."""
        self.rows.append(row)
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.rows))
        os.replace(unfinished, self._path)
        print("  " + "  ".join(f"{name} {short(value)}" for name, value in row.items()), flush=True)

    @contextmanager
    def row(self, **row: Any) -> Generator[dict[str, Any]]:
        """A row that is filled inside; what goes wrong there stands in it, and the next one is tried.

        This is the outermost edge of a measurement: whatever one raises may not cost those after it, and is told.
        """
        try:
            yield row
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:600]}"
            row["where"] = traceback.format_exc(limit=-3)[-1500:]
        self.add(**row)

    def is_out_of_time(self, *, needs: float, what: str) -> bool:
        """Whether less than `needs` seconds are left; if so, `what` is noted as left out."""
        if self.seconds_left >= needs:
            return False
        self.add(left_out=what, reason=f"{self.seconds_left:.0f} s left of this part")
        return True


def short(value: Any) -> str:
    """For people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:160]
