"""The 64 prompts of the parity goldens: English, code, other languages, chat turns and odd input, 3 to about 200 tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParityPrompt:
    """`kind` is english, code, language, odd or chat; a chat prompt's `text` is one user turn, to be put through the chat template."""

    kind: str
    text: str


ENGLISH = (
    "Once upon a",
    "The capital of",
    "Water boils at one hundred degrees",
    "In the beginning the universe was created, and",
    "My grandmother kept three keys in a tin under the stairs:",
    "The three primary colours are",
    "It was the best of times, it was the worst of times, it was the age of wisdom,",
    "According to the second law of thermodynamics, the entropy of an isolated system",
    "List of ingredients for pancakes:\n- 2 cups of flour\n- 1 egg\n-",
    "Q: What is the largest planet in the solar system?\nA:",
    "The invention of the printing press in the fifteenth century changed how knowledge spread across Europe because",
    "Dear Dr. Hamilton,\n\nThank you for your letter of the 14th. I have read the enclosed report with great interest, and",
    "A triangle with sides of length 3, 4 and 5 is a right triangle. This follows from the Pythagorean theorem, since",
    "Chapter 3: The Water Cycle\n\nWater moves continuously between the oceans, the atmosphere and the land. The first stage is evaporation, in which",
    "Breaking news: officials said on Tuesday that the bridge, which was closed in March after inspectors found cracks in two of its main girders, "
    "will reopen to traffic by the end of the month, although heavy lorries will still have to",
    "The old lighthouse keeper had not spoken to anyone for eleven days when the boat finally appeared. He watched it from the gallery, one hand on "
    "the cold iron rail, and tried to remember how to begin a conversation. The wind had dropped in the night, and the sea lay flat and grey as slate. "
    "When the boat touched the jetty he went down the two hundred steps slowly, counting them as he always did, and",
    "Photosynthesis is the process by which green plants, algae and some bacteria convert light energy into chemical energy. It takes place in the "
    "chloroplasts, where chlorophyll absorbs light mostly in the blue and red parts of the spectrum. The process has two stages. In the light-dependent "
    "reactions, water is split, oxygen is released, and ATP and NADPH are formed. In the Calvin cycle, which does not need light directly, carbon dioxide is",
    "Minutes of the meeting held on 4 May. Present: A. Brown (chair), C. Davies, E. Fox, G. Hill. Apologies: I. Jones.\n\n1. The minutes of the last meeting "
    "were accepted.\n2. The treasurer reported that the balance stood at 1,204.50 and that two invoices were outstanding.\n3. It was agreed to repair the roof "
    "of the hall before winter; C. Davies will ask for three quotations.\n4. E. Fox proposed that the summer fair be moved from June to July. After some "
    "discussion the proposal was put to a vote and",
    "There are several ways to estimate the height of a tall building. The simplest is to measure the length of its shadow and compare it with the shadow of a "
    "stick of known length. Another is to walk a known distance from the base and measure the angle to the top. A third, which is often told as a joke, is to "
    "drop a stone from the roof and time its fall. A barometer may be used in more than one way: by measuring the air pressure at the bottom and at the top, by "
    "tying it to a rope and lowering it to the ground, or by offering it to the caretaker in exchange for the answer. Each of these methods has its own sources "
    "of error. The shadow method, for example, depends on flat ground and on the sun being",
    "The history of timekeeping begins with the sky. Early farmers watched the rising of certain stars to know when to sow and when to reap, and the length of a "
    "shadow told them the hour. Sundials were followed by water clocks, in which a steady flow marked the passing of time even at night, and by candles with "
    "notches, and by hourglasses on ships. The mechanical clock appeared in European towers around the end of the thirteenth century; it had no hands at first "
    "and only struck a bell. The pendulum, studied by Galileo and built into a clock by Huygens in 1656, cut the daily error from a quarter of an hour to a few "
    "seconds. A century later John Harrison's marine chronometer made it possible to find longitude at sea. Quartz crystals, vibrating thousands of times a "
    "second, brought accurate time to every wrist, and in our own age the",
)

CODE = (
    "def fibonacci(n):",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "for (int i = 0; i < n; i++) {",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    '{"name": "Alice", "age": 30, "address": {"street":',
    "<!DOCTYPE html>\n<html>\n<head>\n  <title>",
    "#!/bin/bash\nset -e\nfor f in *.txt; do\n",
    "fn main() {\n    let mut v: Vec<i32> = Vec::new();\n    for i in 0..10 {\n        v.push(i);\n    }\n",
    'package main\n\nimport (\n\t"fmt"\n\t"os"\n)\n\nfunc main() {\n\t',
    'class Stack:\n    """A last-in first-out stack."""\n\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n        self._items.append(item)\n\n    def pop(self):\n',
    "// Returns the greatest common divisor of a and b.\nint gcd(int a, int b) {\n    while (b != 0) {\n        int t = b;\n",
    "diff --git a/setup.py b/setup.py\n--- a/setup.py\n+++ b/setup.py\n@@ -1,5 +1,6 @@\n from setuptools import setup\n \n setup(\n",
    "import unittest\n\nfrom shop.cart import Cart, Item\n\n\nclass CartTest(unittest.TestCase):\n    def setUp(self):\n        self.cart = Cart()\n\n    def test_empty_cart_has_total_zero(self):\n"
    "        self.assertEqual(self.cart.total(), 0)\n\n    def test_total_is_sum_of_prices(self):\n        self.cart.add(Item('pen', 2))\n        self.cart.add(Item('book', 12))\n"
    "        self.assertEqual(self.cart.total(), 14)\n\n    def test_remove_item(self):\n        self.cart.add(Item('pen', 2))\n",
    "def merge_sort(values):\n    if len(values) <= 1:\n        return values\n    middle = len(values) // 2\n    left = merge_sort(values[:middle])\n    right = merge_sort(values[middle:])\n"
    "    return merge(left, right)\n\n\ndef merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n"
    "            result.append(left[i])\n            i += 1\n        else:\n",
)

LANGUAGE = (
    "Il était une fois une petite fille qui",
    "Der schnelle braune Fuchs springt über",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme,",
    "Nel mezzo del cammin di nostra vita mi ritrovai",
    "Все счастливые семьи похожи друг на друга,",
    "人工智能是计算机科学的一个分支,",
    "吾輩は猫である。名前はまだ無い。",
    "대한민국의 수도는",
    "اللغة العربية هي",
    "भारत एक विशाल देश है",
    "Η Ακρόπολη βρίσκεται στην",
    "Der Zug nach Hamburg fährt um acht Uhr fünfzehn von Gleis vier ab. Reisende werden gebeten, ihre Fahrkarten bereitzuhalten, weil",
    "Translate English to French:\nsea otter => loutre de mer\npeppermint => menthe poivrée\ncheese =>",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň úpěl ďábelské ódy. Şişli'de büyük çöp yığınları vardı.",
)

ODD = (
    "1, 1, 2, 3, 5, 8, 13,",
    "🙂🚀🎉 Let's go! 🇫🇷👩‍👩‍👧",
    "   \n\t  indented   and\r\n\r\nspaced\u00a0out \u200b text",
    "no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no",
)

CHAT = (
    "What is the capital of France?",
    "Hi!",
    "Write a haiku about autumn.",
    "Explain gravity to a five-year-old.",
    "What is 17 + 25?",
    "Write a Python function that reverses a string.",
    "Summarise in one sentence: The committee met for three hours and agreed only on the date of the next meeting.",
    "Wie heißt die Hauptstadt von Österreich?",
    "Give me three reasons to learn to play the piano, as a numbered list.",
    "I have two apples and buy three bags with four apples each, then give half of all my apples to my sister. How many are left? Think step by step.",
    "Rewrite this email so that it sounds friendlier: 'You did not send the figures. I need them by noon. Do not be late again. The board meets at two and "
    "I will not stand there with empty hands because of you.'",
    "You are a museum guide. Describe, for a group of schoolchildren who have never seen one, how a Roman aqueduct worked: where the water came from, why the "
    "channel had to slope so gently, what the arches were for, who looked after it, and what happened when a part of it broke. Keep it to five short paragraphs "
    "and finish with a question that the children can discuss among themselves.",
)

PROMPTS = tuple(
    ParityPrompt(kind, text)
    for kind, texts in (("english", ENGLISH), ("code", CODE), ("language", LANGUAGE), ("odd", ODD), ("chat", CHAT))
    for text in texts
)
