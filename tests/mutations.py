"""Break the source on purpose, one place at a time, and see that the tests of that room notice.

    python tests/mutations.py                 # all of them, some minutes
    python tests/mutations.py --room data     # those of one room
    python tests/mutations.py --only 3,17     # by number
    python tests/mutations.py --list

The sources are copied to a temporary folder and broken there; the working tree is never touched.
First the chosen tests must pass on the unbroken copy; --unchecked leaves that out, where they are
known to pass. Exit code 1: a mutation survived. Exit code 2: the tests fail without it, or a
mutation stops the tests from running at all.
"""

import argparse
import collections
import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from mutated_places import MUTATIONS, Mutation

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEADLINE_S = 1800  # of one run of the tests
_CAUGHT, _PASSED = 1, 0  # exit codes of pytest


def faults(mutations: Sequence[Mutation], root: pathlib.Path = ROOT) -> list[str]:
    """Mutations that do not apply to the sources below `root`, and why."""
    found = []
    for number, mutation in enumerate(mutations):
        count = (root / mutation.file).read_text().count(mutation.old)
        if count != 1:
            found.append(f"{number} {mutation.file}: {mutation.old!r} is there {count} times")
    return found


def copy_sources(target: pathlib.Path) -> None:
    """Copy what git tracks or would add from the repository to `target`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def load_libraries() -> None:
    """Import once what every run of the tests needs, and nothing of ours."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    sys.path[:] = [path for path in sys.path if not _is_ours(path)]
    for name in ("pytest", "flax.linen", "jax", "ml_collections", "optax", "orbax.checkpoint",
                 "sklearn.datasets", "tensorflow", "tensorflow_datasets"):  # fmt: skip
        __import__(name)


def _is_ours(path: str) -> bool:
    return pathlib.Path(path or ".").resolve().is_relative_to(ROOT)


def run_tests(node_ids: Sequence[str], folder: pathlib.Path) -> tuple[int, str]:
    """(exit code of pytest, its output), run in a fork of this process, with `folder` as root."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            _run_in_child(node_ids, folder, output.fileno())
        code = _wait(child)
        output.seek(0)
        return code, output.read()


def _run_in_child(node_ids: Sequence[str], folder: pathlib.Path, output: int) -> None:
    code = 3
    try:
        os.setsid()  # so that what tests start can be ended with it
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        # A file's stored bytecode is told from its successor's by the second and the length alone.
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        import pytest

        code = pytest.main(
            ["-q", "-x", "--tb=short", "-p", "no:xdist", "-o", "addopts=", *node_ids]
        )
        sys.stdout.flush()
    finally:
        os._exit(int(code))


def _wait(child: int) -> int:
    until = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < until:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    finally:  # on the deadline and on Ctrl-C; nothing is left after a child that has ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


@contextlib.contextmanager
def mutated(mutation: Mutation, folder: pathlib.Path):
    """The copy in `folder` with one mutation, undone at the end."""
    path = folder / mutation.file
    text = path.read_text()
    pathlib.Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        path.write_text(text)


def choose(flags: argparse.Namespace) -> dict[int, Mutation]:
    numbers = range(len(MUTATIONS)) if flags.only is None else map(int, flags.only.split(","))
    chosen = {i: MUTATIONS[i] for i in numbers}
    return {i: m for i, m in chosen.items() if flags.room in (None, m.room)}


def try_one(number: int, mutation: Mutation, folder: pathlib.Path) -> str:
    since = time.monotonic()
    with mutated(mutation, folder):
        code, output = run_tests(mutation.node_ids, folder)
    verdict = {_CAUGHT: "caught", _PASSED: "survived"}.get(code, "error")
    by = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    print(
        f"{verdict:8} {number:3} {mutation.file}: {mutation.old.splitlines()[0]} -> "
        f"{mutation.new.splitlines()[0] if mutation.new else 'nothing'} "
        f"({by[1] if by else 'no test'}, {time.monotonic() - since:.0f} s)",
        flush=True,
    )
    if verdict == "error":
        print(f"pytest ended with {code}\n{output}")
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--room", help="only mutations of this room, such as data or launch")
    parser.add_argument("--only", metavar="N,N", help="only these numbers")
    parser.add_argument("--list", action="store_true", help="print the mutations, and end")
    parser.add_argument("--unchecked", action="store_true", help="do not run the unbroken copy")
    flags = parser.parse_args()
    chosen = choose(flags)
    if flags.list:
        for number, m in chosen.items():
            print(f"{number:3} {m.room:12} {m.file}: {m.old!r} -> {m.new!r}: {m.tests}")
        return 0
    if wrong := faults(MUTATIONS):
        print("not applicable:\n  " + "\n  ".join(wrong))
        return 2
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = pathlib.Path(name)
        copy_sources(folder)
        load_libraries()
        node_ids = list(dict.fromkeys(i for m in chosen.values() for i in m.node_ids))
        code, output = (_PASSED, "") if flags.unchecked else run_tests(node_ids, folder)
        if code != _PASSED:
            print(f"the tests fail without a mutation\n{output}")
            return 2
        verdicts = collections.Counter(
            try_one(number, mutation, folder) for number, mutation in chosen.items()
        )
    print(", ".join(f"{verdicts[v]} {v}" for v in ("caught", "survived", "error")))
    return 2 if verdicts["error"] else 1 if verdicts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
