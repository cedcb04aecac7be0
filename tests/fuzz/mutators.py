"""What turns a right file into a hostile one: bytes edited, values of JSON replaced, answers of a capture and records of a trace."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NUMBERS = [None, True, 0, -1, 1 << 63, 10**30, 10**4000, 1.5, float("nan")]
WORDS = [
    "",
    "junk",
    "\x00\xff",
    "../../x",
    "-9" * 30,
    "9" * 400,
    "9" * 5000,
    "0x" + "f" * 400,
    "\u00b2",
    "1\u00b2",
    "\u0663",
    "\ud800",
]
SHAPES: list[Any] = [[], [1], ["x"], ["x", "y"], [[0, 0]], [0, 0], [None] * 3, {}, {"version": []}]
JUNK: list[Any] = [*NUMBERS, *WORDS, *SHAPES]
"""Values that some question does not expect, or expects smaller."""


class Mutator:
    """Changes one place of a JSON value at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mutate(self, value: Any) -> Any:
        """The value with a change somewhere in it."""
        if isinstance(value, list) and value and self.random.random() < 0.7:
            index = self.random.randrange(len(value))
            return self.random.choice(
                [
                    [*value[:index], self.mutate(value[index]), *value[index + 1 :]],
                    value[:index] + value[index + 1 :],
                    [*value, value[index]],
                ]
            )
        if isinstance(value, dict) and value and self.random.random() < 0.8:
            key = self.random.choice(sorted(value))
            rest = {k: v for k, v in value.items() if k != key}
            return self.random.choice(
                [
                    {**value, key: self.mutate(value[key])},
                    rest,
                    {**rest, self.random.choice(WORDS): value[key]},
                ]
            )
        if isinstance(value, str) and value and self.random.random() < 0.8:
            return self._text(value)
        return self.random.choice(JUNK)

    def _text(self, value: str) -> str:
        """A word of it replaced, dropped or doubled; or cut off somewhere."""
        if self.random.random() < 0.2:
            return value[: self.random.randrange(len(value))]
        words = value.split(" ")
        index = self.random.randrange(len(words))
        words[index] = self.random.choice(
            [
                self.random.choice(WORDS),
                "",
                f"{words[index]} {words[index]}",
                words[index] + "9" * 400,
                words[index] + "\u00b2",
                "-1",
            ]
        )
        return self.random.choice([" ", " ", "\n"]).join(words)

    def answers(self, found: dict[str, Any]) -> dict[str, Any]:
        """Some answers changed."""
        changed = dict(found)
        keys = sorted(found)
        for _ in range(self.random.choice([1, 1, 2, 5, 20])):
            key = self.random.choice(keys)
            if "value" in found[key] and self.random.random() < 0.95:
                changed[key] = {"value": self.mutate(copy.deepcopy(found[key]["value"]))}
            else:
                changed[key] = self.mutate(copy.deepcopy(found[key]))
        return changed

    def trace(self, raw: bytes) -> bytes:
        """A trace with some of its lines changed as JSON, as bytes or in their order; or cut off."""
        lines = raw.split(b"\n")
        for _ in range(self.random.choice([1, 1, 2, 5])):
            index = self.random.randrange(len(lines))
            lines[index] = self._line(lines[index])
        if self.random.random() < 0.1:
            self.random.shuffle(lines)
        out = b"\n".join(lines)
        return out[: self.random.randrange(len(out) + 1)] if self.random.random() < 0.2 else out

    def _line(self, line: bytes) -> bytes:
        """One line changed; mostly it stays JSON."""
        if self.random.random() < 0.15:
            at = self.random.randrange(len(line) + 1)
            return line[:at] + bytes([self.random.randrange(256)]) + line[at + self.random.randrange(2) :]
        text = line.decode("utf-8", "replace").rstrip(",")
        start = '],"otherData":' if text.startswith('],"otherData":') else ""
        try:
            value = json.loads(text[len(start) : -1] if start else text)
        except ValueError:
            return line[: self.random.randrange(len(line) + 1)]
        changed = print_json(self.mutate(value))
        return f"{start}{changed}}}".encode() if start else f"{changed},".encode()


def print_json(value: Any) -> str:
    """JSON as a stranger may print it: NaN, numbers of thousands of digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 1000:
        return "9" * 4000
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(k))}:{print_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(print_json, value)) + "]"
    return json.dumps(value)
