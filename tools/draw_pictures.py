"""Draws the pictures of the code, of a run and of its workdir, from the tables of docs/.

python tools/draw_pictures.py

It writes docs/explanation/floors.svg and run.svg and docs/reference/workdir.svg.
"""

import pathlib
import re
from html import escape

DOCS = pathlib.Path(__file__).parents[1] / "docs"
LINE, LETTER, INK, BOX, MARK = 22, 7.2, "#333", "#e8eef7", "#3f51b5"


class Picture:
    """Boxes, texts and arrows; (x, y) is the left upper corner, in pixels."""

    def __init__(self, width: float, height: float):
        self._size, self._parts = (width, height), list[str]()

    def text(self, x: float, y: float, words: str, *, bold: bool = False, colour: str = INK):
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y + 15}" fill="{colour}"{weight}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, words: str, *, colour: str = BOX) -> float:
        """A box as wide as its words; returns the place right of it."""
        width = len(words) * LETTER + 16
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width:.0f}" height="{LINE}" rx="4" fill="{colour}"/>'
        )
        self.text(x + 8, y, words, colour="#fff" if colour == MARK else INK)
        return x + width

    def arrow(self, *points: tuple[float, float]):
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" '
                           'marker-end="url(#tip)"/>')  # fmt: skip

    def save(self, path: pathlib.Path):
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="monospace" font-size="12">'
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            'orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
            f'<rect width="{width}" height="{height}" fill="#fff"/>'
        )
        path.write_text("\n".join([head, *self._parts, "</svg>"]) + "\n")


def rows_of(page: str, header: str) -> list[tuple[str, str]]:
    """The rows of a table with two columns whose header begins so."""
    lines = (DOCS / page).read_text().split(f"\n{header}", 1)[1].split("\n")[2:]
    rows = [line.strip("| ").split(" | ", 1) for line in lines[: lines.index("")]]
    return [(name, meaning) for name, meaning in rows]


def draw_floors():
    """A row for each floor, the highest first; rooms use those below and to their right."""
    rows = rows_of("explanation/code.md", "| floor | rooms")
    picture = Picture(600, 20 + len(rows) * 34)
    for i, (floor, rooms) in enumerate(rows):
        y, x = 10 + i * 34, 220.0
        picture.text(10, y, floor, bold=True)
        for room in re.findall(r"`(\w+/)`", rooms):
            x = picture.box(x, y, room) + 8
        if i:
            picture.arrow((580, y - 10), (580, y + 8))
    picture.text(480, 10, "imports from")
    picture.text(480, 24, "below, right")
    picture.save(DOCS / "explanation/floors.svg")


def draw_run():
    """From what is asked for to the summary, and the way back of a run that starts again."""
    picture, y, x, places = Picture(680, 180), 30, 10.0, {}
    for word in ("asked", "resolve", "resolved", "build", "run", "loop", "summary.json"):
        does = word in ("resolve", "build", "loop")
        end = picture.box(x, y, word, colour=MARK if does else BOX)
        places[word] = (x + end) / 2
        if word != "summary.json":
            picture.arrow((end, y + 11), (end + 34, y + 11))
        x = end + 36
    for word, notes in {
        "resolve": ("decides open keys:", "source, teachers,", "data, rule, devices"),
        "build": ("mesh, experiment,", "evaluators,", "timetable"),
        "loop": ("steps, rows,", "evaluations, saves", "(checkpoints/)"),
    }.items():
        for i, note in enumerate(notes):
            picture.text(places[word] - 60, y + 30 + 18 * i, note)
    picture.text(places["asked"] - 25, y - 26, "config file and flags")
    low = y + 130
    picture.arrow((places["loop"], y + 90), (places["loop"], low), (places["resolve"], low),
                  (places["resolve"], y + 90))  # fmt: skip
    picture.text(places["resolve"] + 10, low - 22, "killed or stopped: the same command goes on")
    picture.save(DOCS / "explanation/run.svg")


def draw_workdir():
    """The files of a workdir, as the table on its page lists them."""
    rows = rows_of("reference/workdir.md", "| in the workdir |")
    names = [re.findall(r"`([^`]+)`", name) for name, _ in rows]
    kinds = {
        "config.json": "what the run is",
        "metrics.jsonl": "what it measured",
        "checkpoints/": "what it saved, and when it ran",
        "teachers.json": "what is there if asked for",
    }
    picture, y = Picture(480, 40 + (LINE + 3) * (sum(map(len, names)) + len(kinds) / 2)), 34.0
    picture.box(10, 6, "WORKDIR/", colour=MARK)
    for name in (name for row in names for name in row):
        if name in kinds:
            y += LINE / 2
            picture.text(260, y, kinds[name], bold=True)
        picture.arrow((22, 28), (22, y + 11), (44, y + 11))
        picture.box(46, y, name)
        y += LINE + 3
    picture.save(DOCS / "reference/workdir.svg")


if __name__ == "__main__":
    draw_floors()
    draw_run()
    draw_workdir()
