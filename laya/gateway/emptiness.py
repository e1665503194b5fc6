"""Owns: in how many ways a place of a grammar or of a pattern can match nothing.

An engine tries each of these ways at every token, and repeats of what can be empty multiply them: three nested
`{0,1000}` or four rules of four options each keep it busy for good. Knows the notations as far as that takes, no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_WAYS = 1_000_000  # counted no further
# Repeats of what can be empty, as in (a{0,500}){0,500}, cost the engine their product, half a minute here: none has use
# for more than a few.
COUNTED_MOST = 4
_QUANTIFIER = r"(?P<quantifier>[?*+]|\{\s*(?:\d+\s*)?(?:,\s*(?:\d+\s*)?)?\})"
_CLASS = r"\[(?:\\.|[^\]\\])*\]?"  # one that is never closed goes to the end, so that reading stays linear
_GBNF = re.compile(
    rf'#[^\n]*|(?P<empty>"")|(?P<atom>"(?:\\.|[^"\\])*"?|{_CLASS}|\.)|(?P<name>[A-Za-z0-9][\w-]*)'
    rf"|(?P<mark>[()|])|{_QUANTIFIER}",
    re.S,
)
_PATTERN = re.compile(
    rf"(?P<open>\((?:\?(?:[:=!]|<[=!]|<\w+>))?)|(?P<mark>[)|])|{_QUANTIFIER}|[\^$]|(?P<atom>{_CLASS}|\\.|.)", re.S
)
_RULE = re.compile(r"^[ \t]*([A-Za-z0-9][\w-]*)\s*::=", re.M)


class _Group:
    """A group that is being read: ways to be empty of its finished alternatives and of the one at hand."""

    def __init__(self) -> None:
        self.finished = 0
        self.alternative = 1
        self.run = 1  # since the last item that can't be empty
        self.last: int | None = None

    def close_item(self) -> int:
        """Take the last item, to which no quantifier belongs any more; returns the ways through the run."""
        if self.last is not None:
            self.alternative = min(self.alternative * self.last, MOST_WAYS)
            self.run = min(self.run * self.last, MOST_WAYS) if self.last else 1
            self.last = None
        return self.run

    def close_alternative(self) -> int:
        ways = self.close_item()
        self.finished = min(self.finished + self.alternative, MOST_WAYS)
        self.alternative = self.run = 1
        return max(ways, self.finished)


def ways_of_pattern(pattern: str) -> int:
    """The most ways of any place of a regular expression to match nothing."""
    return _read(_PATTERN, pattern, lambda name: 0)[1]


def ways_of_gbnf(grammar: str) -> int:
    """The most ways of any place of a GBNF grammar to match nothing. Raises RecursionError: a long chain of rules."""
    starts = list(_RULE.finditer(grammar))
    ends = [start.start() for start in starts[1:]] + [len(grammar)]
    texts = {start.group(1): grammar[start.end() : end] for start, end in zip(starts, ends, strict=True)}
    known: dict[str, tuple[int, int]] = {}

    def ways_of(name: str) -> int:
        if name not in known:
            known[name] = (0, 1)  # what a rule that is being read says of itself
            known[name] = _read(_GBNF, texts.get(name, '"x"'), ways_of)
        return known[name][0]

    for name in texts:
        ways_of(name)
    return max((peak for _, peak in known.values()), default=1)


def backwards_in_pattern(pattern: str) -> str | None:
    """A repeat of a regular expression whose least is above its most, as in a{2,1}."""
    return _backwards(_PATTERN, pattern)


def backwards_in_gbnf(grammar: str) -> str | None:
    """The same of a GBNF grammar."""
    return _backwards(_GBNF, grammar)


def _backwards(notation: re.Pattern[str], text: str) -> str | None:
    for token in notation.finditer(text):
        if token.lastgroup == "quantifier" and "," in token.group():
            low, high = (each.strip().lstrip("0") for each in token.group().strip("{}").split(","))
            if (len(low), low) > (len(high), high) and not token.group().strip("{} \t\r\n").endswith(","):
                return token.group()
    return None


def _read(notation: re.Pattern[str], text: str, ways_of: Callable[[str], int]) -> tuple[int, int]:
    """Ways of the whole text to be empty, and the most ways of any place in it."""
    groups, peak = [_Group()], 1
    for token in notation.finditer(text):
        kind, said = token.lastgroup, token.group()
        group = groups[-1]
        if kind == "quantifier":
            group.last = _repeated(group.last or 0, said)
        elif kind == "open" or said == "(":
            peak = max(peak, group.close_item())
            groups.append(_Group())
        elif kind == "mark":
            peak = max(peak, group.close_alternative())
            if said == ")" and len(groups) > 1:
                groups.pop()
                groups[-1].last = group.finished
        elif kind is not None:
            peak = max(peak, group.close_item())
            group.last = ways_of(said) if kind == "name" else int(kind == "empty")
    while len(groups) > 1:  # the engine refuses what is left open
        peak = max(peak, groups.pop().close_alternative())
    peak = max(peak, groups[0].close_alternative())
    return groups[0].finished, peak


def _repeated(ways: int, quantifier: str) -> int:
    if quantifier in ("?", "*"):
        return ways + 1
    if quantifier == "+":
        return ways
    low, comma, high = "".join(quantifier.strip("{}").split()).partition(",")
    least = int(low[:9] or 0)
    most = int(high[:9]) if high.strip() else least + (1 if comma else 0)
    if not ways:
        return int(least == 0)
    if most > COUNTED_MOST:
        return MOST_WAYS
    return min(sum(int(ways**times) for times in range(least, most + 1)), MOST_WAYS)
