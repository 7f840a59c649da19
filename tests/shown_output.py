"""Compares the output that a page shows with the output that its commands print.

Another CPU rounds differently, so numbers need only be near, and the parts of a line may stand in
another order.
"""

import re

_PARTS = re.compile(r"[,|;:│]\s+|\s*[|│]\s*")  # between the parts of a line
_NUMBER = re.compile(r"\d[\d,:]*(?:\.\d+)?%?")
_BY_THE_CLOCK = ("images/s", "images_per_s", "ETA", "chip_hours", "compiled in")


def read_parts(line):
    """{text with N for each number: the numbers, as text} of the parts of a line."""
    found = {}
    for part in filter(None, _PARTS.split(line)):
        text = _NUMBER.sub("N", " ".join(part.split()))
        found.setdefault(text, []).extend(_NUMBER.findall(part))
    return found


def is_near(text, shown, printed):
    """Whether `printed` may stand for the number `shown` behind `text`.

    Whole numbers are counts and must be equal. Shares may differ by 30 points, other numbers by a
    factor of two and 0.1. Numbers that follow from the clock may be any.
    """
    if ":" in shown or any(word in text for word in _BY_THE_CLOCK):
        return True
    first, second = (float(number.rstrip("%").replace(",", "")) for number in (shown, printed))
    if "%" in shown + printed:
        return shown[-1] == printed[-1] == "%" and abs(first - second) <= 30
    if "." not in shown + printed:
        return first == second
    return abs(first - second) <= 0.1 + max(first, second) / 2


def is_printed(shown, lines):
    """Whether one of `lines` has the parts of the line `shown`, in any order, and near numbers."""
    return any(_are_near(read_parts(shown), read_parts(line)) for line in lines)


def _are_near(shown, printed):
    counts = [{text: len(numbers) for text, numbers in parts.items()} for parts in (shown, printed)]
    return counts[0] == counts[1] and all(
        is_near(text, *pair)
        for text in shown
        for pair in zip(shown[text], printed[text], strict=True)
    )
