"""Text for evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.evaluation.corpus import detokenize, read_text


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
