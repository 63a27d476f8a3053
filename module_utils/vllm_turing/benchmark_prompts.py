"""Prompts that no cache can know, steered to a number of tokens.

Each starts with a fresh 64-character random identifier and goes on with random words, so that not
even its first block is in a prefix cache. Its length is found with the model's own tokenizer.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable

TokenCount = Callable[[str], int]

WORD_BANK = """
amber anchor apple arrow autumn bamboo basket beacon bottle branch bridge bronze button cabin
camera candle canyon carpet castle cellar cherry circle clover cobalt coffee copper corner
cotton cradle crystal curtain cycle dance desert diamond dragon dream eagle echo ember engine
evening falcon feather fern field finger flame forest fossil frost galaxy garden ginger glacier
glass gold grain granite gravel guitar hammer harbor harvest hazel helmet honey horizon hunter
island ivory jacket jasmine jungle kernel kettle kitchen ladder lagoon lantern lemon letter
library lizard magnet maple marble meadow mirror monsoon morning mountain needle nickel north
nutmeg oasis ocean olive onion orange orbit orchid oxygen paddle palace paper pebble pencil
pepper piano pilot planet pocket prairie quartz quiver rabbit radio raven ribbon river rocket
saddle saffron sailor salmon sandal satin school shadow silver simple sister sketch smoke snow
spiral spring stone storm summer sunset table temple thunder tiger timber tower travel tulip
tunnel turtle valley velvet violet violin voyage walnut water whisper willow window winter wolf
yellow zenith zipper
"""
WORDS = WORD_BANK.split()

TOLERANCE = 0.005
"""Share of the wanted length by which a prompt may miss it."""
MOST_ROUNDS = 6

QUESTION = "Write a long and detailed essay about these words; do not stop early."


class LengthError(Exception):
    """The wanted length cannot be reached; one clear sentence."""


def make(words: int, rng: random.Random) -> str:
    """Return a prompt of so many random words behind a fresh random identifier."""
    identifier = f"{random_hex(rng)}{random_hex(rng)}"
    return f"{identifier} {' '.join(rng.choices(WORDS, k=max(words, 0)))}\n{QUESTION}"


def random_hex(rng: random.Random) -> str:
    """Return the 32 hexadecimal digits of a random UUID."""
    return uuid.UUID(int=rng.getrandbits(128), version=4).hex


def steer(
    tokens: int, count: TokenCount, rng: random.Random, tolerance: float = TOLERANCE
) -> tuple[str, int]:
    """Return a prompt of about so many tokens, and how many it has.

    The number of words follows the measured tokens a word; LengthError when even a prompt without
    words is longer than wanted, or when the tokenizer's answers do not lead there.
    """
    empty = make(0, rng)
    base = count(empty)
    if base > tokens:
        raise LengthError(
            f"a prompt of {tokens} tokens is too short: its frame alone has {base}; ask for more."
        )
    allowed = max(2, round(tokens * tolerance))
    words, rate = round((tokens - base) / 1.3), 1.3
    text, found = empty, base
    for _ in range(MOST_ROUNDS):
        text = make(words, rng)
        found = count(text)
        if abs(found - tokens) <= allowed:
            return text, found
        if words > 0 and found > base:
            rate = (found - base) / words
        words = max(0, round((tokens - base) / rate))
    raise LengthError(f"no prompt of {tokens} tokens was found; the nearest had {found}.")
