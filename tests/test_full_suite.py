"""The table of .ci/full: one row per test file, the latest result of each."""

import pathlib

import pytest
from loaded_file import load_module

ROOT = pathlib.Path(__file__).parents[1]
SUITE = '<testsuite tests="{}" failures="{}" errors="0" skipped="{}" time="61.7"/>'
XML = f"<testsuites>{SUITE}</testsuites>"


@pytest.fixture(scope="module")
def full():
    return load_module(ROOT / ".ci/record_result.py")


@pytest.mark.parametrize(
    ("counts", "result"),
    [((9, 0, 0), "9 passed"), ((9, 2, 1), "6 passed, **2 failed**, 1 skipped")],
)
def test_result_of_a_file(full, tmp_path, counts, result):
    path = tmp_path / "result.xml"
    assert full.describe(path) == ("**stopped before its end**", "")
    path.write_text(XML.format(*counts))
    assert full.describe(path) == (result, "62")


def test_rows_are_replaced_and_those_of_lost_files_removed(full, tmp_path):
    table = tmp_path / "table.md"
    files = "tests/test_main.py", "tests/test_gone.py", "tests/test_docs.py"
    rows = "".join(f"| {file} | 1 passed | 9 | | | |\n" for file in files)
    table.write_text(f"# Page\n\n{full.HEADING}\n|---|\n{rows}")
    full.record("tests/test_api.py", ["3 passed", "5"], table)
    full.record("tests/test_main.py", ["2 passed", "7"], table)
    head, _, *lines = table.read_text().partition("# Page\n\n")[2].splitlines()
    assert head == full.HEADING
    assert [line.split("|")[1:3] for line in lines] == [
        [" tests/test_api.py ", " 3 passed "],
        [" tests/test_docs.py ", " 1 passed "],
        [" tests/test_main.py ", " 2 passed "],
    ]
