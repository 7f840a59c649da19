"""Random faults over 1 to 4 processes: does the run end with the bits that it has without them?

python tests/chaos.py --schedules=100 [--first=0] WORK

Schedule number i is drawn from the seed i. Its job runs under launch/local.py with `job.inject`,
and is started again as long as its message says that the same command goes on. The last save and
all rows, timings aside, are then compared with those of a job of as many processes without faults.

WORK/results.jsonl gets a line for each schedule, and those that it has are not run again;
WORK/NUMBER keeps the workdir and the output of one that does not end equal.
"""

import argparse
import collections
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

import forked
import jax
import launch.conftest
import numpy as np
from cheap_compilation import flags_for
from finished_run import final_state, rows

from vit_jax.job.exit_codes import FAILED, INPUT_WRONG, INTERRUPTED, PREEMPTED
from vit_jax.run.watch.faults import parse_faults

STEPS, DEADLINE_S, MOST_STARTS, LONGEST_S = 40, 10, 25, 900
WORDS = (
    "--config=quickstart:debug", f"--config.duration={STEPS} steps",
    "--config.global_batch_size=24", "--config.evals.test.batch_size=360",
    "--config.log.every=1 step", f"--config.job.step_deadline_s={DEADLINE_S}",
    f"--config.job.heartbeat_s={2 * DEADLINE_S}", f"--config.job.save_deadline_s={2 * DEADLINE_S}",
)  # fmt: skip
KINDS = {  # kind: the seconds that it may get
    "kill": (), "term": (), "cut": (), "full_disk": (), "damage": (),
    "stop": (1, 2, 3 * DEADLINE_S), "clock": (-3600, -2, 86400), "slow_disk": (0.05, 0.2),
}  # fmt: skip
SAID = {  # what a person sees at the end of a start: as a pattern
    "was ended by SIGKILL": "was ended by SIGKILL",
    "preempted": "^preempted",
    "File too large": "File too large",
    "no checkpoint is valid": "no checkpoint in .* is valid",
    "Connection closed by peer": "Connection (?:reset|closed) by peer",
    "process 1 is lost": r"process \d is lost",
    "process 0, the coordinator, is unreachable": "coordinator, is unreachable",
    "process 1 has not passed step 11": r"process \d has not passed",
    "none makes progress": "none? makes? progress|no progress",
    "aborted by JAX": "aborted by JAX",
}
CAUSES = {
    "File too large": "full_disk",
    "preempted": "term",
    "no checkpoint is valid": "damage",
}


class Schedule(NamedTuple):
    number: int
    processes: int
    words: tuple[str, ...] = ()
    faults: str = ""

    @property
    def devices(self) -> int:
        """Devices of each process; 4 in all, or 3 of three processes."""
        return max(4 // self.processes, 1)


def draw(number: int) -> Schedule:
    r = random.Random(number)
    (processes,) = r.choices((1, 2, 3, 4), (35, 35, 15, 15))
    words = [f"--config.checkpoint.every={r.choice((5, 8, 10))} steps"]
    if r.random() < 0.3:
        words.append("--config.checkpoint.memory_every=3 steps")
    found = {}
    for kind in r.choices([kind for kind in KINDS if processes > 1 or kind != "cut"],
                          k=r.choice((1, 2, 2, 3, 4))):  # fmt: skip
        seconds = f":seconds={r.choice(KINDS[kind])}" if KINDS[kind] else ""
        step = r.randint(2, STEPS)
        found[f"{kind}:process={r.randrange(processes)}:step={step}{seconds}"] = None
    return Schedule(number, processes, tuple(words), ",".join(found))


class Process:
    """In the place of `subprocess.Popen` in launch/local.py: forked, with the libraries there."""

    def __init__(self, command, env, **_):
        if "--process_id=0" in command:
            print(f"=== start {time.time()}", flush=True)
        own = {"XLA_FLAGS": flags_for(env["JAX_NUM_CPU_DEVICES"])}
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder, "output")
            os.mkfifo(output)
            self._process = forked.Forked(tuple(command[1:3]), command[3:], output, own)
            self.stdout = open(output, "rb")  # noqa: SIM115
        self.poll, self.wait = self._process.poll, self._process.wait
        self.send_signal = self._process.send_signal


local = launch.conftest.load("local")
local.subprocess = argparse.Namespace(Popen=Process, DEVNULL=None, PIPE=None, STDOUT=None)


def start(schedule: Schedule, work: pathlib.Path) -> bool:
    """Run the schedule's job under launch/local.py; return whether to run it again.

    Does for it what the message asks for.
    """
    inject = [f"--config.job.inject={schedule.faults}"] if schedule.faults else []
    words = ["--", *WORDS, *schedule.words, f"--workdir={work / 'run'}", *inject]
    sys.argv = ["local.py", f"--num_processes={schedule.processes}", "--platform=cpu",
                f"--devices_per_process={schedule.devices}", *words]  # fmt: skip
    before = (work / "output").stat().st_size if (work / "output").exists() else 0
    with open(work / "output", "a") as output, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        code = local.launcher_main(local.define_flags(), local.launch)
        print(f"=== ended {code}")
    said = (work / "output").read_text()[before:]
    if code == INPUT_WRONG and "move the directory away to start from scratch" in said:
        saved = work / "run/checkpoints"
        saved.rename(saved.with_name(f"damaged-{len(list(saved.parent.glob('damaged-*')))}"))
        return True
    if code == INPUT_WRONG:  # a full disk, which is free again
        return "then run the same command again" in said
    return code in (FAILED, PREEMPTED, INTERRUPTED) or code > 128


class Start(NamedTuple):
    """A start after the first one.

    cause: the kind of the fault that ended the one before; "" if there was none since it began.
    code: the exit code after which a person has started it; None: the launcher has.
    said: what a person saw.
    lost: steps that were computed again.
    """

    cause: str
    code: int | None
    said: list[str]
    lost: int


def find_starts(work: pathlib.Path) -> list[Start]:
    marks = sorted((p.stat().st_mtime, p.name) for p in (work / "run/injected").glob("*"))
    _, *parts = re.split(r"^=== start (.*)\n", (work / "output").read_text(), flags=re.MULTILINE)
    times, texts, found = [float(t) for t in parts[::2]], parts[1::2], []
    for i in range(1, len(times)):
        said = [words for words, form in SAID.items() if re.search(form, texts[i - 1], re.M)]
        new = [parse_faults(name)[0].kind for at, name in marks if times[i - 1] < at < times[i]]
        ending = [kind for kind in new if kind not in ("slow_disk", "clock", "full_disk")]
        causes = [CAUSES[words] for words in said if words in CAUSES] or (ending or new)[-1:]
        ended = re.findall(r"^=== ended (.*)", texts[i - 1], re.MULTILINE)
        lost = sum(int(steps) for steps in re.findall(r"lost: (\d+) steps", texts[i]))
        found.append(Start("".join(causes[:1]), int(ended[0]) if ended else None, said, lost))
    return found


def describe(workdir: pathlib.Path) -> list:
    """[the SHA-256 of the last save, all rows in their order]."""
    step, leaves = final_state(workdir)
    digest = hashlib.sha256(f"{step}".encode())
    for name in sorted(leaves):
        array = np.ascontiguousarray(leaves[name])
        digest.update(f"{name} {array.shape} {array.dtype}".encode() + array.tobytes())
    return [digest.hexdigest(), rows(workdir)]


def reference(work: pathlib.Path, processes: int) -> dict:
    """{"ends": as `describe` gives it, "seconds": that it took} of a job without faults."""
    path = work / f"reference-{processes}.json"
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may draw other schedules
        if not path.exists():
            ends = []
            for name in ("first", "second"):  # the second has the compiled programs
                folder = work / f"reference-{processes}-{name}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                since = time.monotonic()
                assert not start(Schedule(-1, processes), folder), f"see {folder}/output"
                seconds = time.monotonic() - since
                ends.append(describe(folder / "run"))
            assert ends[0] == ends[1], "two undisturbed runs differ"
            path.write_text(json.dumps({"ends": ends[0], "seconds": seconds}))
    return json.loads(path.read_text())


def follow(schedule: Schedule, work: pathlib.Path) -> dict:
    """The result of a schedule."""
    expected, folder, since = (
        reference(work, schedule.processes),
        work / f"{schedule.number}",
        time.monotonic(),
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    signal.signal(signal.SIGALRM, end)
    signal.alarm(LONGEST_S)
    try:
        for _ in range(MOST_STARTS):
            if not start(schedule, folder):
                break
        found = json.loads(json.dumps(describe(folder / "run")))
    except Exception as e:  # a result too
        found = [f"{type(e).__name__}: {e}"]
    signal.alarm(0)
    made = sorted(path.name for path in (folder / "run/injected").glob("*"))
    result = {
        **schedule._asdict(), "made": made, "starts": [s._asdict() for s in find_starts(folder)],
        "seconds_more": round(time.monotonic() - since - expected["seconds"], 1),
        "equal": found == expected["ends"],
    }  # fmt: skip
    if result["equal"]:
        shutil.rmtree(folder / "run/checkpoints")
    return result


def show(results: list[dict]) -> None:
    """Print a line for each kind of fault."""
    heads = ("fault", "times", "restarts by the launcher", "by a person, after exit code",
             "what was said", "steps lost: median (most)", "equal bits")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for kind in KINDS:
        made = [(r, text) for r in results for text in r["made"] if text.startswith(f"{kind}:")]
        starts = [s for r in results for s in r["starts"] if s["cause"] == kind]
        codes = collections.Counter(s["code"] for s in starts)
        said = collections.Counter(words for s in starts for words in s["said"])
        by_hand = ", ".join(f"{n} after {code}" for code, n in codes.items() if code is not None)
        lost = [s["lost"] for s in starts] or [0]
        equal = sum(r["equal"] for r, _ in made)
        print(f"| `{kind}` | {len(made)} | {codes[None]} | {by_hand or '0'} | "
              f"{'; '.join(f'{w} ({n})' for w, n in said.most_common(4))} | "
              f"{statistics.median(lost):g} ({max(lost)}) | {equal} |")  # fmt: skip
    wrong = [r["number"] for r in results if not r["equal"]]
    print(f"{len(results)} schedules, {sum(len(r['made']) for r in results)} faults; not equal: "
          f"{wrong or 'none'}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("work", type=pathlib.Path)
    flags = parser.parse_args()
    work, numbers = flags.work.resolve(), range(flags.first, flags.first + flags.schedules)
    sys.modules["__main__"].__file__ = None  # so that forked processes do not run this file
    work.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_USE_LEGACY_KERAS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }  # fmt: skip
    path = work / "results.jsonl"
    path.touch()
    done = {json.loads(line)["number"] for line in path.read_text().splitlines()}
    for number in numbers:
        if number not in done:
            result = json.dumps(follow(draw(number), work))
            with open(path, "a") as file:
                file.write(result + "\n")
            print(result, flush=True)
    results = [json.loads(line) for line in path.read_text().splitlines()]
    results = [result for result in results if result["number"] in numbers]
    show(results)
    return int(not all(result["equal"] for result in results))


def end(*_) -> None:
    raise TimeoutError(f"no end within {LONGEST_S} s")


if __name__ == "__main__":
    sys.exit(main())
