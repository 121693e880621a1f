"""Structure-aware damage to files: numbers of headers, values of JSON, whole files; every choice from a seeded generator."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

INTEGERS = [
    0,
    1,
    2,
    3,
    7,
    31,
    255,
    256,
    2**15,
    2**16,
    2**20,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -8,
]
VALUES: list[Any] = [
    None,
    True,
    False,
    "",
    "x",
    "x" * 3000,
    "\u0000",
    [],
    {},
    [[]],
    0.5,
    -1.5,
    1e300,
    float("inf"),
    float("nan"),
    [0],
    [1] * 40,
    "F64",
    "U8",
    "int8",
    *INTEGERS,
]

Mutate = Callable[[Path, random.Random], None]
"""Changes files of a whole checkpoint."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def mutated_json(text: str, rng: random.Random) -> bytes:
    """A JSON text with one to three places changed, a key doubled, or its bytes damaged."""
    if rng.random() < 0.15:
        return damaged_bytes(text.encode(), rng)
    value = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        found = list(places(value))
        if not found:
            break
        taken = [other[other_key] for other, other_key in found]
        holder, key = rng.choice(found)
        way = rng.randrange(6)
        if way == 0:
            del holder[key]
        elif way == 1:
            holder[key] = copy.deepcopy(rng.choice(taken))
        elif way == 2 and isinstance(holder, dict):
            holder[rng.choice([f"{key}x", "", "extra", "quantization_config", "rope_scaling"])] = copy.deepcopy(holder[key])
        elif way == 3 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += rng.choice([1, -1, 8, -8, 2**31, holder[key]])
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    written = json.dumps(value)
    if rng.random() < 0.05:
        written = written[:-1] + ", " + written[1:]  # every key twice
    if rng.random() < 0.03:
        written = written.replace(rng.choice(written), rng.choice(["[" * 5000, "1e999", "9" * 5000, "\\ud800", "}"]), 1)
    return written.encode(errors="surrogatepass")


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Cut, padded, or with some bytes changed."""
    way = rng.randrange(4)
    if way == 0:
        return content[: rng.randrange(len(content) + 1)]
    if way == 1:
        return content + bytes(rng.randrange(256) for _ in range(rng.choice([1, 8, 100])))
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 4, 16])):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice([0, 255, 127, 128, rng.randrange(256)])
    return bytes(changed)


def change_file(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def mutate_safetensors(folder: Path, rng: random.Random) -> None:
    """The header's length, its JSON, the index, or bytes."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    way = rng.randrange(8)
    if way == 0:
        number = rng.choice([length + 1, length - 1, len(content), len(content) - 8, *(value % 2**64 for value in INTEGERS)])
        path.write_bytes(struct.pack("<Q", number % 2**64) + content[8:])
    elif way == 1:
        path.write_bytes(damaged_bytes(content[: 8 + length], rng) + content[8 + length :])
    elif way == 2:
        path.write_bytes(damaged_bytes(content, rng))
    elif way == 3:
        change_file(folder / "model.safetensors.index.json", lambda text: mutated_json(text.decode(), rng))
    elif way == 4:
        path.unlink()
    else:
        header = mutated_json(content[8 : 8 + length].decode(), rng)
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def gguf_numbers(content: bytes) -> list[tuple[int, str]]:
    """Where each number of a GGUF header lies, and its struct format: counts, lengths, types, dimensions, offsets, values."""
    scalar = dict(zip(range(13), ["B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d"], strict=True))
    found: list[tuple[int, str]] = []
    position = 4

    def number(form: str) -> int:
        nonlocal position
        found.append((position, form))
        position += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, content, found[-1][0])[0]

    def skip_text() -> None:
        nonlocal position
        length = number("Q")  # which moves on itself
        position += length

    number("I")
    num_tensors, num_fields = number("Q"), number("Q")
    for _ in range(num_fields):
        skip_text()
        kind = number("I")
        item, length = (number("I"), number("Q")) if kind == 9 else (kind, 1)
        for _ in range(length):
            skip_text() if item == 8 else number(scalar[item])
    for _ in range(num_tensors):
        skip_text()
        for _ in range(number("I")):
            number("Q")
        number("I")
        number("Q")
    return found


def mutate_gguf(folder: Path, rng: random.Random) -> None:
    """A number of the header, a name, or bytes."""
    path = folder / "model.gguf"
    content = bytearray(path.read_bytes())
    numbers = gguf_numbers(content)
    header_end = numbers[-1][0] + 8
    way = rng.randrange(6)
    if way <= 3:
        for _ in range(rng.choice([1, 1, 2])):
            at, form = rng.choice(numbers)
            size = struct.calcsize("<" + form)
            old = int.from_bytes(content[at : at + size], "little")
            new = rng.choice([*INTEGERS, old + 1, old - 1, old * 2, old ^ 1])
            content[at : at + size] = (new % 2 ** (8 * size)).to_bytes(size, "little")
        path.write_bytes(content)
    elif way == 4:
        path.write_bytes(damaged_bytes(bytes(content[:header_end]), rng) + content[header_end:])
    else:
        path.write_bytes(damaged_bytes(bytes(content), rng))


def mutate_orbax(folder: Path, rng: random.Random) -> None:
    """The manifest, a configuration, or a file of a shard: changed, gone, or under another's name."""
    way = rng.randrange(6)
    if way <= 2:
        change_file(folder / "jaxinfer.json", lambda text: mutated_json(text.decode(), rng))
        return
    if way == 3:
        name = rng.choice(["config.json", "generation_config.json", "tokenizer_config.json"])
        change_file(folder / name, lambda text: mutated_json(text.decode(), rng))
        return
    paths = sorted(path for path in folder.glob("weights-*/**/*") if path.is_file())
    path = rng.choice(paths)
    if way == 4 and rng.random() < 0.5:
        path.unlink()
    elif way == 4:
        path.write_bytes(rng.choice(paths).read_bytes())
    else:
        change_file(path, lambda content: damaged_bytes(content, rng))


def mutate_config(folder: Path, rng: random.Random) -> None:
    """config.json."""
    change_file(folder / "config.json", lambda text: mutated_json(text.decode(), rng))


def mutate_tokenizer(folder: Path, rng: random.Random) -> None:
    """tokenizer.json or a file beside it."""
    name = rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    change_file(folder / name, lambda text: mutated_json(text.decode(), rng))


MUTATIONS: dict[str, Mutate] = {
    "safetensors": mutate_safetensors,
    "gguf": mutate_gguf,
    "orbax": mutate_orbax,
    "config": mutate_config,
    "tokenizer": mutate_tokenizer,
}
