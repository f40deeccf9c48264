"""Loops over the keys of names, numbers of 64 bits, compiled by numba.

A table of open addresses: a slot holds the number of a key, in the order in which keys came, or −1.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from givens.kernels.cpu.grid import compiled

LONG = np.uint64
# Of FNV-1a.
BLOCK = 256
OFFSET, PRIME = LONG(0xCBF29CE484222325), LONG(0x100000001B3)


@compiled()
def scramble(x: np.uint64) -> np.uint64:
    """The last steps of splitmix64: a bijection whose bits are as good as random."""
    x = LONG((x ^ (x >> LONG(30))) * LONG(0xBF58476D1CE4E5B9))
    x = LONG((x ^ (x >> LONG(27))) * LONG(0x94D049BB133111EB))
    return LONG(x ^ (x >> LONG(31)))


@compiled()
def hash_texts(ends: NDArray[Any], text: NDArray[Any], keys: NDArray[Any]) -> None:
    """The key of each text; text i ends at byte `ends[i + 1]`, where the next begins."""
    for i in range(len(keys)):
        h = OFFSET
        for at in range(ends[i], ends[i + 1]):
            h = LONG((h ^ LONG(text[at])) * PRIME)
        keys[i] = np.int64(scramble(h))


@compiled()
def count_keys(
    keys: NDArray[Any],
    slots: NDArray[Any],
    known: NDArray[Any],
    counts: NDArray[Any],
    size: int,
    most: int,
) -> tuple[int, int]:
    """Count keys in a table of `size` known ones, and add those that are new, up to `most`.

    Gives how many keys were counted and how many are known now: fewer than all where the table has
    to grow first.
    """
    mask = LONG(len(slots) - 1)
    near, guess = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int32)
    for first in range(0, len(keys), BLOCK):
        if size + BLOCK > most:
            return first, size
        end = min(first + BLOCK, len(keys))
        # Loads that wait for no other, of a block at a time.
        for i in range(first, end):
            near[i - first] = scramble(LONG(keys[i])) & mask
        for i in range(first, end):
            guess[i - first] = slots[near[i - first]]
        for i in range(first, end):
            number = guess[i - first]
            if number >= 0 and known[number] == keys[i]:
                counts[number] += 1
                guess[i - first] = -2
        for i in range(first, end):
            if guess[i - first] == -2:
                continue
            key, slot = keys[i], near[i - first]
            number = slots[slot]
            while number >= 0 and known[number] != key:
                slot = (slot + LONG(1)) & mask
                number = slots[slot]
            if number < 0:
                number = size
                slots[slot], known[number], counts[number] = number, key, 0
                size += 1
            counts[number] += 1
    return len(keys), size


@compiled()
def place_keys(known: NDArray[Any], slots: NDArray[Any]) -> None:
    """Put known keys, all different, into slots that are empty."""
    mask = LONG(len(slots) - 1)
    for number in range(len(known)):
        slot = scramble(LONG(known[number])) & mask
        while slots[slot] >= 0:
            slot = (slot + LONG(1)) & mask
        slots[slot] = number


@compiled()
def find_keys(
    keys: NDArray[Any], slots: NDArray[Any], known: NDArray[Any], numbers: NDArray[Any]
) -> None:
    """The number of each key, −1 for one that is not known."""
    mask = LONG(len(slots) - 1)
    near = np.empty(BLOCK, np.uint64)
    for first in range(0, len(keys), BLOCK):
        end = min(first + BLOCK, len(keys))
        for i in range(first, end):
            near[i - first] = scramble(LONG(keys[i])) & mask
        for i in range(first, end):
            numbers[i] = slots[near[i - first]]
        for i in range(first, end):
            slot = near[i - first]
            while numbers[i] >= 0 and known[numbers[i]] != keys[i]:
                slot = (slot + LONG(1)) & mask
                numbers[i] = slots[slot]


@compiled()
def scramble_keys(keys: NDArray[Any], seed: np.uint64, found: NDArray[Any]) -> None:
    """A hash of each key by a seed."""
    word = scramble(seed)
    for i in range(len(keys)):
        found[i] = scramble(LONG(keys[i]) ^ word)
