"""Runs the members of a study, one after another or through a launcher, and reports on them.

A member is the training command with its own overrides and workdir: each can be repeated by hand.
What it came to is read from its workdir alone, so a study goes on where it was, on any machine.
"""

import collections
import copy
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from vit_jax import config as config_lib
from vit_jax.config import stored as stored_config
from vit_jax.config import text as config_text
from vit_jax.errors import collect_faults
from vit_jax.files import write_whole
from vit_jax.job import exit_codes
from vit_jax.studies.members import (
    DIVERGED,
    FAILED,
    FINISHED,
    HANDED_OVER,
    Member,
    Report,
    Result,
    Study,
)
from vit_jax.training.guards import DIVERGED_FILE
from vit_jax.training.validation import validate
from vit_jax.training.workdir import continue_run

logger = logging.getLogger("vit_jax")

# Exit codes of a member after which no other is run.
_ENDS_THE_STUDY = {
    exit_codes.INPUT_WRONG: "is refused",
    exit_codes.DOES_NOT_FIT: "does not fit, by the plan",
    exit_codes.PREEMPTED: "was told to stop, and has saved; the same command goes on",
    exit_codes.TERMINATED: "was told to stop; the same command goes on",
    exit_codes.INTERRUPTED: "was interrupted; the same command goes on",
}

# Of a resolved config what the data say, where the user says nothing.
_FILLED_IN = ("data.num_classes", "data.num_examples", "data.order", "data.streams")
_LAST_LINES = 20


class Call(NamedTuple):
    """How a study was called.

    config_file: FILE[:words].
    overrides: the user's, which every member gets.
    workdir: of the study.
    launcher: its words; None: members run here.
    again: whether members that were handed over are handed over once more.
    trust_plugins: whether members run the copies of plug-ins in workdirs.
    """

    config_file: str
    overrides: Sequence[tuple[str, str]]
    workdir: epath.Path
    launcher: Sequence[str] | None
    again: bool
    trust_plugins: bool = False


def member_words(call: Call, member: Member) -> list[str]:
    """What follows `python -m vit_jax.main`, or the `--` of a launcher."""
    overrides = [*call.overrides, *member.overrides.items()]
    return [
        f"--config={call.config_file}",
        *(f"--config.{key}={value}" for key, value in overrides),
        f"--workdir={os.fspath(call.workdir / member.name)}",
        *["--trust_plugins"] * call.trust_plugins,
    ]


def check_member(config: ConfigDict, call: Call, member: Member) -> None:
    """Raises InputError if a member's config is wrong, or its workdir holds a run of another."""
    own = copy.deepcopy(config)  # with the types of what is None
    faults = config_text.apply_overrides(own, list(member.overrides.items()))
    validate(own, faults, f"member {member.name}")
    workdir = call.workdir / member.name
    if not (workdir / "config.json").exists():
        return
    own = continue_run(own, workdir)
    stored = stored_config.read_config(workdir)
    changed = config_lib.changed_keys(stored, own)
    changed |= config_lib.changed_evals(stored, own)  # which a single run may change
    changed = {
        key: (was, now)
        for key, (was, now) in changed.items()
        if now is not None or key not in _FILLED_IN
    }
    collect_faults(
        config_lib.say_changes(changed),
        f"{workdir} already holds a run with other settings; restore them, or use a new --workdir",
    )


def read_result(workdir: epath.Path) -> Result | None:
    """What the run in `workdir` came to; None if it has not ended, or ended otherwise."""
    for name, state in (("summary.json", FINISHED), (DIVERGED_FILE, DIVERGED)):
        if (workdir / name).exists():
            found = json.loads((workdir / name).read_text())
            return Result(state, found) if state == FINISHED else Result(state, {}, found["error"])
    return None


def conduct_study(study: Study, config: ConfigDict, call: Call) -> int:
    """Runs what is not finished of a study, as far as it goes; returns the exit code.

    Raises:
      InputError: the config is none for this study or a member; nothing was run then.
    """
    results: dict[str, Result] = {}
    while True:
        waiting = [m for m in study.members(config, results) if m.name not in results]
        for member in waiting:
            check_member(config, call, member)
        if not waiting:
            break
        for member in waiting:
            code, results[member.name] = _bring_about(call, member)
            refused = code == exit_codes.INPUT_WRONG
            if refused and len(results) == 1:
                print(f"{member.name} {_ENDS_THE_STUDY[code]}", file=sys.stderr)
                return code  # and nothing is written
            _write_report(study, config, call, results)
            # One member's data may be wrong where those of others are not.
            others_go = refused and any(
                result.state in (FINISHED, HANDED_OVER) for result in results.values()
            )
            if code in _ENDS_THE_STUDY and not others_go:
                print(f"{member.name} {_ENDS_THE_STUDY[code]}", file=sys.stderr)
                return code
    return _conclude(_write_report(study, config, call, results), call, results)


def _bring_about(call: Call, member: Member) -> tuple[int, Result]:
    """The exit code of a member, 0 if it is not run or has a result, and what it came to.

    143 though it has one, if the study was told to stop meanwhile.
    """
    result = read_result(call.workdir / member.name)
    if result is not None:
        logger.info("%s: %s before", member.name, result.state)
        return exit_codes.DONE, result
    handed_over = _read_handed_over(call.workdir)
    if member.name in handed_over and not call.again:
        return exit_codes.DONE, Result(HANDED_OVER)
    words = member_words(call, member)
    command = [sys.executable, "-m", "vit_jax.main", *words]
    shown = ["python", *command[1:]]
    if call.launcher is not None:
        command = shown = [*call.launcher, "--", *words]
    logger.info("%s: %s", member.name, shlex.join(shown))
    ended = _execute(command)
    # What had all but ended when it was told to stop may end as if it was not.
    stopped = exit_codes.TERMINATED if ended.told_to_stop else exit_codes.DONE
    result = read_result(call.workdir / member.name)
    if result is not None:
        return stopped, result
    if ended.code == exit_codes.DONE and call.launcher is not None:
        content = json.dumps(handed_over | {member.name: shlex.join(shown)}, indent=2) + "\n"
        write_whole(_handed_over_file(call.workdir), content)
        return stopped, Result(HANDED_OVER)
    error = f"ended with exit code {ended.code}\n{ended.last_lines}".strip()
    code = ended.code if ended.code in _ENDS_THE_STUDY else stopped or ended.code
    return code, Result(FAILED, {}, error)


class _Ended(NamedTuple):
    """How a command has ended.

    code: its exit code.
    last_lines: of what it said on standard error.
    told_to_stop: whether SIGTERM came to this process, and was passed on, while it ran.
    """

    code: int
    last_lines: str
    told_to_stop: bool


def _execute(command: Sequence[str]) -> _Ended:
    """Waits for a command to end; SIGTERM to this process is passed on to it."""
    last_lines: collections.deque = collections.deque(maxlen=_LAST_LINES)
    process, told_to_stop = None, False

    def stop(*_):
        nonlocal told_to_stop
        told_to_stop = True
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
        if told_to_stop:
            process.terminate()
        with process:
            for line in process.stderr:
                sys.stderr.write(line)
                last_lines.append(line)
    finally:
        signal.signal(signal.SIGTERM, before)
    return _Ended(exit_codes.of_ended(process.returncode), "".join(last_lines), told_to_stop)


def _handed_over_file(workdir: epath.Path) -> epath.Path:
    return workdir / "handed_over.json"


def _read_handed_over(workdir: epath.Path) -> dict[str, str]:
    """{member: command} of all that was ever handed over."""
    path = _handed_over_file(workdir)
    return json.loads(path.read_text()) if path.exists() else {}


def _write_report(
    study: Study, config: ConfigDict, call: Call, results: Mapping[str, Result]
) -> Report:
    """Writes study.json and study.md, of what there is by now."""
    report = study.report(config, results)
    members = {
        member.name: {
            "state": results[member.name].state,
            "command": shlex.join(["python", "-m", "vit_jax.main", *member_words(call, member)]),
            "summary": dict(results[member.name].summary),
            "error": results[member.name].error,
        }
        for member in study.members(config, results)
        if member.name in results
    }
    warnings = _warn_of_older_members(call, results)
    content = {
        "study": config.study.name,
        "complete": report.complete,
        **report.values,
        "warnings": warnings,
        "members": members,
    }
    write_whole(call.workdir / "study.json", json.dumps(content, indent=2) + "\n")
    lines = [report.columns, ["---"] * len(report.columns), *report.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    commands = "\n".join(member["command"] for member in members.values())
    warned = "".join(f"Warning: {line}.\n\n" for line in warnings)
    text = f"# {config.study.name}\n\n{table}\n\n{warned}The members:\n\n```sh\n{commands}\n```\n"
    write_whole(call.workdir / "study.md", text)
    for name, file in report.files.items():
        write_whole(call.workdir / name, file)
    return report


def _warn_of_older_members(call: Call, results: Mapping[str, Result]) -> list[str]:
    """Names each key by which members of older versions go on in another way than the others."""
    kept = {name: stored_config.kept_values(call.workdir / name) for name in results}
    lines = []
    for key in config_lib.IN_OLDER_RUNS:
        values = {name: values[key] for name, values in kept.items() if values}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{value!r} in {name}" for name, value in values.items())
            lines.append(f"{key} differs, so their results may not compare: {shown}")
    return lines


def _conclude(report: Report, call: Call, results: Mapping[str, Result]) -> int:
    """Shows what a study has come to; the exit code."""
    table = Table(*report.columns)
    for row in report.rows:
        table.add_row(*row)
    Console().print(table)
    by_state = {
        state: [name for name, result in results.items() if result.state == state]
        for state in (FAILED, HANDED_OVER, DIVERGED)
    }
    for name in by_state[FAILED]:
        print(f"{name} failed: {results[name].error}", file=sys.stderr)
    for name in by_state[DIVERGED]:
        print(f"{name} diverged: {results[name].error}", file=sys.stderr)
    written = ["study.md", "study.json", *report.files]
    for line in _warn_of_older_members(call, results):
        print(f"warning: {line}", file=sys.stderr)
    print(f"report: {', '.join(str(call.workdir / name) for name in written)}")
    if by_state[FAILED]:
        return exit_codes.FAILED
    if by_state[HANDED_OVER]:
        print(
            f"handed over and not finished: {', '.join(by_state[HANDED_OVER])}; once they are, the "
            "same command goes on (--again hands them over once more, should they be lost)"
        )
        return exit_codes.DONE
    if not report.complete:
        print("error: the study cannot be completed: too many members diverged", file=sys.stderr)
    return exit_codes.DONE if report.complete else exit_codes.FAILED
