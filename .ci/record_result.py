"""Write the result of one test file into a table of .ci/results.md.

python .ci/record_result.py tests/ROOM/test_FILE.py RESULT.xml COMMIT TABLE.md
"""

import datetime
import pathlib
import platform
import sys
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).parents[1]
HEADING = "| file | result | seconds | date | commit | Python, jax |"


def describe(result: pathlib.Path) -> tuple[str, str]:
    """("9 passed, 1 skipped", seconds) of pytest's JUnit file; "stopped" where there is none."""
    if not result.exists():
        return "**stopped before its end**", ""
    suite = ElementTree.parse(result).getroot().find("testsuite")
    counts = {kind: int(suite.get(kind)) for kind in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    parts = [f"{passed} passed"]
    parts += [f"**{failed} failed**"] if failed else []
    parts += [f"{counts['skipped']} skipped"] if counts["skipped"] else []
    return ", ".join(parts), f"{float(suite.get('time')):.0f}"


def record(file: str, cells: list[str], table: pathlib.Path) -> None:
    """Replace the row of `file` in `table`, or add it in the files' order.

    Rows of files that are gone are removed.
    """
    before, heading, after = table.read_text().partition(HEADING)
    assert heading, f"{table}: has no line {HEADING!r}"
    rule, *rows = after.strip().splitlines()
    by_file = {row.split("|")[1].strip(): row for row in rows}
    by_file = {name: row for name, row in by_file.items() if (ROOT / name).exists()}
    by_file[file] = f"| {' | '.join([file, *cells])} |"
    lines = [heading, rule, *(by_file[name] for name in sorted(by_file))]
    table.write_text(before + "\n".join(lines) + "\n")


def main(file: str, result: str, commit: str, table: str) -> None:
    import jax

    today = datetime.date.today().isoformat()
    versions = f"{platform.python_version()}, {jax.__version__}"
    record(file, [*describe(pathlib.Path(result)), today, commit, versions], pathlib.Path(table))


if __name__ == "__main__":
    main(*sys.argv[1:])
