"""Runs the members of a study, one after another or through a launcher, and reports on them.

A member is the training command with its own overrides and workdir, and can be repeated by hand.
Its result is read only from its workdir, so a study can be continued on any machine.
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
from rich.table import Column, Table
from rich.text import Text

from vit_jax import config as config_lib
from vit_jax.config import stored as stored_config
from vit_jax.config import text as config_text
from vit_jax.errors import collect_faults
from vit_jax.files import write_whole
from vit_jax.job import exit_codes
from vit_jax.run.guards import DIVERGED_FILE
from vit_jax.run.validation import validate
from vit_jax.studies.members import (
    DIVERGED,
    FAILED,
    FINISHED,
    HANDED_OVER,
    WORKDIR,
    Member,
    Report,
    Result,
    Study,
)
from vit_jax.studies.recorded import find_differences

logger = logging.getLogger("vit_jax")

# Exit codes of a member that end the study.
_ENDS_THE_STUDY = {
    exit_codes.INPUT_WRONG: "was rejected",
    exit_codes.DOES_NOT_FIT: "does not fit, according to the plan",
    exit_codes.PREEMPTED: "was told to stop, and has saved; run the same command to continue",
    exit_codes.TERMINATED: "was told to stop; run the same command to continue",
    exit_codes.INTERRUPTED: "was interrupted; run the same command to continue",
}

_LAST_LINES = 20


class Call(NamedTuple):
    """The command line of a study.

    config_file: FILE[:words].
    overrides: the user's overrides, for every member.
    workdir: directory of the study.
    launcher: words of the command that starts training members; None: they run here.
    again: whether to hand over members once more that were handed over before.
    trust_plugins: whether members may run the copies of plug-ins in workdirs.
    quiet: whether members show warnings and errors only.
    """

    config_file: str
    overrides: Sequence[tuple[str, str]]
    workdir: epath.Path
    launcher: Sequence[str] | None
    again: bool
    trust_plugins: bool = False
    quiet: bool = False


def member_words(call: Call, member: Member) -> list[str]:
    """Arguments of a member, to follow `python -m vit_jax.main` or the `--` of a launcher."""
    overrides = [*call.overrides, *member.overrides.items()]
    return [
        *[member.command] * (member.command != "train"),
        f"--config={call.config_file}",
        *(f"--config.{key}={value}" for key, value in overrides),
        f"--workdir={os.fspath(call.workdir / member.name)}",
        *["--trust_plugins"] * call.trust_plugins,
        *["--quiet"] * call.quiet,
    ]


def placed_members(
    study: Study, config: ConfigDict, call: Call, results: Mapping[str, Result]
) -> list[Member]:
    """The members of a study that are known by `results`, with the study's workdir filled in."""
    where = os.fspath(call.workdir)
    return [
        member._replace(
            overrides={key: text.replace(WORKDIR, where) for key, text in member.overrides.items()}
        )
        for member in study.members(config, results)
    ]


def member_config(
    config: ConfigDict, member: Member, faults: list[str] | None = None
) -> ConfigDict:
    """The study's `config` with the overrides of `member`; their faults are added to `faults`."""
    own = copy.deepcopy(config)  # keeps the types of keys that are None
    found = config_text.apply_overrides(own, list(member.overrides.items()))
    if faults is not None:
        faults += found
    return own


def check_member(config: ConfigDict, call: Call, member: Member) -> None:
    """Raise InputError if a member's config is wrong, or its workdir holds another run."""
    faults: list[str] = []
    own = member_config(config, member, faults)
    validate(own, faults, f"member {member.name}")
    workdir = call.workdir / member.name
    if member.command == "label":
        _check_labels(own, workdir)
    if not (workdir / "config.json").exists():
        return
    stored = stored_config.read_stored(workdir)
    own = config_lib.with_values(own, stored_config.keep_resolved(own, stored))
    changed = config_lib.changed_keys(stored.resolved, own)
    changed |= config_lib.changed_evals(stored.resolved, own)  # a single run may change these
    collect_faults(
        config_lib.say_changes(changed),
        f"{workdir} already holds a run with other settings; restore them, or use a new --workdir",
    )


def _check_labels(config: ConfigDict, workdir: epath.Path) -> None:
    """Raise InputError if the labels in `workdir` were chosen by other keys than `config` has."""
    result = read_result(workdir)
    flat = config_lib.flatten(config)
    chosen = {} if result is None else result.summary["choice"]
    changed = {key: (was, flat[key]) for key, was in chosen.items() if was != flat[key]}
    collect_faults(
        config_lib.say_changes(changed),
        f"{workdir} already holds labels of another choice; restore it, or use a new --workdir",
    )


def read_result(workdir: epath.Path) -> Result | None:
    """The result of the run in `workdir`; None unless it has finished or diverged."""
    for name, state in (("summary.json", FINISHED), (DIVERGED_FILE, DIVERGED)):
        if (workdir / name).exists():
            found = json.loads((workdir / name).read_text())
            return Result(state, found) if state == FINISHED else Result(state, {}, found["error"])
    return None


def waiting_members(study: Study, config: ConfigDict, call: Call) -> list[Member]:
    """The members that can run now: without a result, and not handed over, unless `call.again`.

    Raises:
      InputError: the config is none for a member.
    """
    handed_over = () if call.again else _read_handed_over(call.workdir)
    results: dict[str, Result] = {}
    waiting = []
    while new := [m for m in placed_members(study, config, call, results) if m.name not in results]:
        for member in new:
            check_member(config, call, member)
            result = read_result(call.workdir / member.name)
            if result is None and member.name not in handed_over:
                waiting.append(member)
            results[member.name] = result or Result(HANDED_OVER)
    return waiting


def conduct_study(study: Study, config: ConfigDict, call: Call) -> int:
    """Run the unfinished members of a study, as far as possible; return the exit code.

    Raises:
      InputError: the config does not fit the study or a member; nothing has been run.
    """
    results: dict[str, Result] = {}
    while True:
        known = placed_members(study, config, call, results)
        waiting = [m for m in known if m.name not in results]
        for member in waiting:
            check_member(config, call, member)
        if not waiting:
            break
        for member in waiting:
            code, results[member.name] = _bring_about(call, member)
            refused = code == exit_codes.INPUT_WRONG
            if refused and len(results) == 1:
                print(f"{member.name} {_ENDS_THE_STUDY[code]}", file=sys.stderr)
                return code  # nothing has been written
            _write_report(study, config, call, results)
            # The data of one member may be at fault while those of others are fine.
            others_go = refused and any(
                result.state in (FINISHED, HANDED_OVER) for result in results.values()
            )
            if code in _ENDS_THE_STUDY and not others_go:
                print(f"{member.name} {_ENDS_THE_STUDY[code]}", file=sys.stderr)
                return code
    return _conclude(_write_report(study, config, call, results), call, results)


def _bring_about(call: Call, member: Member) -> tuple[int, Result]:
    """Run a member unless it has a result; return its exit code (0 if it is not run) and result.

    Only training goes through the launcher; `label` runs in one process, here.
    The code is 143 even with a result, if the study was told to stop meanwhile.
    """
    result = read_result(call.workdir / member.name)
    if result is not None:
        logger.info("%s: already %s", member.name, result.state)
        return exit_codes.DONE, result
    handed_over = _read_handed_over(call.workdir)
    if member.name in handed_over and not call.again:
        return exit_codes.DONE, Result(HANDED_OVER)
    words = member_words(call, member)
    command = [sys.executable, "-m", "vit_jax.main", *words]
    shown = ["python", *command[1:]]
    handed_on = call.launcher is not None and member.command == "train"
    if handed_on:
        command = shown = [*call.launcher, "--", *words]
    logger.info("%s: %s", member.name, shlex.join(shown))
    ended = _execute(command)
    # A member that had nearly ended when it was told to stop may still end normally.
    stopped = exit_codes.TERMINATED if ended.told_to_stop else exit_codes.DONE
    result = read_result(call.workdir / member.name)
    if result is not None:
        return stopped, result
    if ended.code == exit_codes.DONE and handed_on:
        record_handed_over(call.workdir, {member.name: shlex.join(shown)})
        return stopped, Result(HANDED_OVER)
    error = f"ended with exit code {ended.code}\n{ended.last_lines}".strip()
    code = ended.code if ended.code in _ENDS_THE_STUDY else stopped or ended.code
    return code, Result(FAILED, {}, error)


class _Ended(NamedTuple):
    """How a command has ended.

    code: its exit code.
    last_lines: the last lines of its standard error.
    told_to_stop: whether this process received SIGTERM, and passed it on, while it ran.
    """

    code: int
    last_lines: str
    told_to_stop: bool


def _execute(command: Sequence[str]) -> _Ended:
    """Run a command and wait for its end; SIGTERM to this process is passed on to it.

    Raises:
      KeyboardInterrupt: on Ctrl-C, once the command has ended; it receives Ctrl-C too and may save.
    """
    last_lines: collections.deque = collections.deque(maxlen=_LAST_LINES)
    process, told_to_stop, interrupted = None, False, False

    def interrupt(*_):
        nonlocal interrupted
        interrupted = True

    def stop(*_):
        nonlocal told_to_stop
        told_to_stop = True
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    before_interrupt = signal.getsignal(signal.SIGINT)
    if before_interrupt != signal.SIG_IGN:  # which nohup asks for
        signal.signal(signal.SIGINT, interrupt)
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
        signal.signal(signal.SIGINT, before_interrupt)
    if interrupted:
        raise KeyboardInterrupt
    return _Ended(exit_codes.of_ended(process.returncode), "".join(last_lines), told_to_stop)


def _handed_over_file(workdir: epath.Path) -> epath.Path:
    return workdir / "handed_over.json"


def record_handed_over(workdir: epath.Path, commands: Mapping[str, str]) -> None:
    """Adds {member: command} to what was handed over in the study of `workdir`."""
    content = json.dumps(_read_handed_over(workdir) | commands, indent=2) + "\n"
    write_whole(_handed_over_file(workdir), content)


def _read_handed_over(workdir: epath.Path) -> dict[str, str]:
    """{member: command} for all members that were ever handed over."""
    path = _handed_over_file(workdir)
    return json.loads(path.read_text()) if path.exists() else {}


def _write_report(
    study: Study, config: ConfigDict, call: Call, results: Mapping[str, Result]
) -> Report:
    """Write study.json and study.md with the results so far."""
    report = study.report(config, results)
    members = {
        member.name: {
            "state": results[member.name].state,
            "command": shlex.join(["python", "-m", "vit_jax.main", *member_words(call, member)]),
            "summary": dict(results[member.name].summary),
            "error": results[member.name].error,
        }
        for member in placed_members(study, config, call, results)
        if member.name in results
    }
    warnings = find_differences(call.workdir, results)
    content = {
        "study": config.study.name,
        "complete": report.complete,
        "columns": report.columns,
        "rows": report.rows,
        "best": report.best,
        **report.values,
        "warnings": warnings,
        "members": members,
    }
    write_whole(call.workdir / "study.json", json.dumps(content, indent=2) + "\n")
    lines = [report.columns, ["---"] * len(report.columns), *report.rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    table = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
    commands = "\n".join(member["command"] for member in members.values())
    warned = "".join(f"Warning: {line}.\n\n" for line in warnings)
    text = f"# {config.study.name}\n\n{table}\n\n{warned}The members:\n\n```sh\n{commands}\n```\n"
    write_whole(call.workdir / "study.md", text)
    for name, file in report.files.items():
        write_whole(call.workdir / name, file)
    return report


def _conclude(report: Report, call: Call, results: Mapping[str, Result]) -> int:
    """Print the results of a study; return the exit code."""
    table = Table(*(Column(Text(column)) for column in report.columns))
    for row in report.rows:
        table.add_row(*map(Text, row))
    Console().print(table)
    if report.best:
        print(f"best: {', '.join(str(call.workdir / name) for name in report.best)}")
    by_state = {
        state: [name for name, result in results.items() if result.state == state]
        for state in (FAILED, HANDED_OVER, DIVERGED)
    }
    for name in by_state[FAILED]:
        print(f"{name} failed: {results[name].error}", file=sys.stderr)
    for name in by_state[DIVERGED]:
        print(f"{name} diverged: {results[name].error}", file=sys.stderr)
    written = ["study.md", "study.json", *report.files]
    for line in find_differences(call.workdir, results):
        print(f"warning: {line}", file=sys.stderr)
    print(f"report: {', '.join(str(call.workdir / name) for name in written)}")
    if by_state[FAILED]:
        return exit_codes.FAILED
    if by_state[HANDED_OVER]:
        print(
            f"handed over and not finished: {', '.join(by_state[HANDED_OVER])}; when they have "
            "finished, run the same command (--again hands them over once more if they are lost)"
        )
        return exit_codes.DONE
    if not report.complete:
        print("error: the study is incomplete: too many members diverged", file=sys.stderr)
    return exit_codes.DONE if report.complete else exit_codes.FAILED
