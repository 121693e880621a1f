"""Write goldens/NAME.json.gz: varied lines with the token ids that transformers gives them. Needs torch.

    python tests/tokenizer/make_goldens.py smollm2 PATH/SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/tokenizer/make_goldens.py gemma3 PATH/gemma-3-270m-q4_k_m.gguf
    python tests/tokenizer/make_goldens.py qwen2 PATH/qwen2.5-coder-0.5b-instruct.gguf

The lines are the same on every run. Each entry is [line, ids, decoded]; `decoded` is transformers' decoding of the ids, or
null where that is the line itself (the vocabulary has no token for some bytes, whose characters are lost).
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

NUM_LINES = {"smollm2": 2000, "gemma3": 1000, "qwen2": 500}
OUTPUT = Path(__file__).parent / "goldens"

CODE = [
    "def f(x: int) -> dict[str, list[int]]:\n    return {k: [v for v in range(10)] for k in 'abc'}",
    '\tif err := json.Unmarshal(b, &v); err != nil {\n\t\treturn nil, fmt.Errorf("bad: %w", err)\n\t}',
    "impl<'a, T: Clone + 'static> Iterator for Foo<'a, T> { type Item = &'a T; fn next(&mut self) -> Option<Self::Item> { None } }",
    '#include <stdio.h>\r\nint main(void) { for (int i = 0; i < 1e3; i++) printf("%d\\n", i << 2); return 0; }\r\n',
    "SELECT COUNT(*) AS n, u.name FROM users u LEFT JOIN orders o ON o.user_id = u.id WHERE u.age >= 18 GROUP BY 2;",
    "const add = async (a, b) => { await sleep(10); return `${a + b}`?.length ?? 0; };  // TODO: fix",
    '<div class="row" style=\'width:100%\'>&nbsp;<a href="https://example.com/?q=1&b=2#x">link</a></div>',
    "awk '{ print $1, $NF }' /var/log/*.log | sort -u | xargs -I{} sh -c 'echo {}' 2>&1 >/dev/null",
    "main = mapM_ (putStrLn . show) $ takeWhile (< 100) [x^2 | x <- [1..], odd x]",
    "template <typename... Args> auto sum(Args&&... args) { return (args + ... + 0ull); }",
    '{"a": [1, 2.5e-10, null, true], "b": {"c": "\\u00e9\\n"}}',
    "\\begin{equation} \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2} \\end{equation}",
]
WORDS = [
    "I'm you're he'll they've we'd it's DON'T CAN'T o'clock rock'n'roll 'tis y'all'd've",
    "The quick brown fox jumps over the lazy dog",
    "Café naïve façade Ångström Straße señor Łódź Győr İstanbul ǅungla",
    "e\u0301a\u0308o\u0302 Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324a\u030a ﬁ ﬂ Ⅷ ½ ² ₃ ①",
    "今天天气很好，我们去公园散步吧！你好，世界。「測試」",
    "日本語の文章を続けて書きます。カタカナとひらがな、漢字ｶﾅ",
    "이 문장은 한국어로 작성되었습니다. 안녕하세요 ㅋㅋㅋ",
    "مرحبا بالعالم، كيف حالك اليوم؟ ١٢٣٤٥ لا إله",
    "שלום עולם, מה שלומך היום? בְּרֵאשִׁית",
    "नमस्ते दुनिया, आप कैसे हैं? १२३४ क्षत्रिय",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "Привет, мир! Съешь же ещё этих мягких французских булок",
    "Γειά σου Κόσμε! Ελληνικά · ≤ ≥ ≠ ∑ ∫ √ ∞ → ⇒ ∀x∈ℝ",
    "வணக்கம் உலகம் বাংলা ভাষা ગુજરાતી తెలుగు ಕನ್ನಡ മലയാളം",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇩🇪 👍🏽 ❤️‍🔥 🤷🏿‍♀️ 1️⃣ ☺️ 🫠 🧑‍💻",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 𐍈 𓀀 😀😃😄 🀄 𠮷野家",
]
SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\t\t",
    "\n",
    "\r\n",
    "\n\n\n",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
    "\u2028",
    "\ufeff",
    " \t ",
    "\x0b\x0c",
    "\u202f",
]
SMOLLM2_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<repo_name>",
    "<file_sep>",
    "<jupyter_code>",
    "<empty_output>",
    "<|im_start",
    "<s>",
    "[INST]",
]
GEMMA3_SPECIAL = [
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<unused7>",
    "<0x0A>",
    "<table>",
    "</b>",
    "[multimodal]",
    "\u2581",
    "\u2581\u2581",
    "<start_of",
]
QWEN2_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|file_sep|>",
    "<|im_start",
]
SPECIAL = {"smollm2": SMOLLM2_SPECIAL, "gemma3": GEMMA3_SPECIAL, "qwen2": QWEN2_SPECIAL}
PUNCTUATION = "!?.,;:-–—_…'\"“”‘’«»()[]{}<>/\\|@#$%^&*+=~`§¶•©®™°±×÷€£¥"


def code(rng: random.Random) -> str:
    text = rng.choice(CODE)
    cut = rng.randrange(len(text))
    return rng.choice(SPACES) * rng.randrange(4) + (text if rng.random() < 0.5 else text[cut:] + rng.choice(SPACES) + text[:cut])


def words(rng: random.Random) -> str:
    pool = " ".join(rng.sample(WORDS, 3)).split(" ")
    return "".join(rng.choice(pool) + (" " if rng.random() < 0.7 else rng.choice(SPACES)) for _ in range(rng.randrange(1, 14)))


def digits(rng: random.Random) -> str:
    runs = ["".join(rng.choice("0123456789") for _ in range(rng.randrange(1, 12))) for _ in range(rng.randrange(1, 7))]
    return "".join(run + rng.choice([" ", "", ".", ",", "-", "x", "e", "%", " €", "²", "٣", "Ⅷ", "½", "७", "\t"]) for run in runs)


def spaces(rng: random.Random) -> str:
    return "".join(rng.choice([*SPACES, "a", "B1", ".", "é"]) for _ in range(rng.randrange(1, 16)))


def specials(rng: random.Random, special: list[str]) -> str:
    return "".join(rng.choice([rng.choice(special), rng.choice(SPACES), rng.choice(WORDS)[:9], "user"]) for _ in range(rng.randrange(1, 9)))


def controls(rng: random.Random) -> str:
    return "".join(rng.choice([chr(rng.randrange(32)), chr(rng.randrange(127, 160)), "ok", " "]) for _ in range(rng.randrange(1, 16)))


def long_word(rng: random.Random) -> str:
    letters = rng.choice(["a", "ab", "abcdefghijklmnopqrstuvwxyz", "éü", "漢字", "хи", "ACGT", "aB3", "=-", "하"])
    return "".join(rng.choice(letters) for _ in range(rng.randrange(60, 400)))


def punctuation(rng: random.Random) -> str:
    return "".join(rng.choice([*PUNCTUATION, "a", " ", "s", "'s", "'ll"]) for _ in range(rng.randrange(1, 30)))


def any_characters(rng: random.Random) -> str:
    blocks = [
        (0x20, 0x7F),
        (0xA0, 0x250),
        (0x370, 0x530),
        (0x590, 0xE00),
        (0x2000, 0x2C00),
        (0x4E00, 0xA000),
        (0xE000, 0xE100),
        (0x10000, 0x110000),
    ]
    return "".join(chr(rng.randrange(*rng.choice(blocks))) for _ in range(rng.randrange(1, 14)))


KINDS: list[Callable[[random.Random], str] | None] = [
    code,
    words,
    words,
    words,
    digits,
    spaces,
    None,  # specials, which depend on the vocabulary
    controls,
    long_word,
    punctuation,
    any_characters,
]


def lines(name: str) -> list[str]:
    """Different lines for a vocabulary, with its own special tokens."""
    rng = random.Random(20)
    found = dict.fromkeys(["", " ", "\n", *CODE, *WORDS])
    while len(found) < NUM_LINES[name]:
        kind = KINDS[len(found) % len(KINDS)]
        found[specials(rng, SPECIAL[name]) if kind is None else kind(rng)] = None
    return list(found)


def main(name: str, gguf_file: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    entries = []
    for line in lines(name):
        ids = tokenizer.encode(line)
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        entries.append([line, ids, None if decoded == line else decoded])
    OUTPUT.mkdir(exist_ok=True)
    text = json.dumps(entries, ensure_ascii=True, separators=(",", ":"))
    (OUTPUT / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
