"""Runs the members of a study, one after another or through a launcher, and reports on them.

A member is the training command with its own overrides and workdir, and can be repeated by hand.
Its result is read only from its workdir, so a study can be continued on any machine.
"""

import collections
import json
import logging
import operator
import os
import shlex
import signal
import statistics
import subprocess
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit_jax import config as config_lib
from vit_jax.base.addresses import reveal
from vit_jax.base.errors import InputError, collect_faults
from vit_jax.base.files import read_json, write_whole
from vit_jax.base.latex import as_latex
from vit_jax.checkpoints.history import check_summary
from vit_jax.config import plugins
from vit_jax.config import stored as stored_config
from vit_jax.config.durations import total_steps
from vit_jax.job import exit_codes
from vit_jax.run.setup.changes import KEYS_OF_THE_END, branch_command, changed_settings
from vit_jax.run.setup.validation import validate
from vit_jax.run.setup.workdir import read_starts
from vit_jax.run.terminal import readable
from vit_jax.run.watch.guards import DIVERGED_FILE
from vit_jax.studies.engine import Found, Member, Result, Results, Study, without_seed
from vit_jax.studies.tables import DIVERGED, FAILED, FINISHED, HANDED_OVER, Best, Measured, Report

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
_HANDED_OVER_FILE = "handed_over.json"


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


def check_members(study: Study, call: Call, members: Iterable[Member]) -> None:
    """Raise InputError if a member's config is wrong, or its workdir holds another run."""
    for member in members:
        faults: list[str] = []
        own, workdir = study.config_of(member.overrides, faults), call.workdir / member.name
        validate(own, faults, f"member {member.name}")
        if member.command == "label":
            flat, result = config_lib.flatten(own), read_result(workdir)
            chosen = {} if result is None else result.summary["choice"]
            changed = {key: (was, flat[key]) for key, was in chosen.items() if was != flat[key]}
        elif (workdir / "config.json").exists():
            stored = stored_config.read_stored(workdir)
            own = config_lib.with_values(own, stored_config.keep_resolved(own, stored))
            changed = changed_settings(stored.resolved, own)
            # A single run may change its evaluators.
            changed |= config_lib.changed_evals(stored.resolved, own)
            if read_result(workdir) is not None and _is_longer(stored.resolved, own):
                changed = {k: both for k, both in changed.items() if k not in KEYS_OF_THE_END}
        else:
            continue
        collect_faults(
            config_lib.say_changes(changed),
            f"{workdir} already holds a run with other settings; restore them, or use a new "
            "--workdir",
        )


def _is_longer(run: ConfigDict, asked: ConfigDict) -> bool:
    return total_steps(run) > total_steps(asked)


def read_result(workdir: epath.Path) -> Result | None:
    """The result of the run in `workdir`; None unless it has finished or diverged."""
    if (summary := read_json(workdir / "summary.json", check_summary)) is not None:
        return Result(FINISHED, summary)
    diverged = read_json(workdir / DIVERGED_FILE, operator.itemgetter("error"))
    return None if diverged is None else Result(DIVERGED, error=diverged["error"])


def waiting_members(study: Study, call: Call) -> list[Member]:
    """The members that can run now: without a result, and not handed over, unless `call.again`.

    Raises:
      InputError: the config is none for a member.
    """
    handed_over = () if call.again else _read_handed_over(call.workdir)
    results: dict[str, Result] = {}
    waiting = []
    while new := [m for m in study.ready(results) if m.name not in results]:
        check_members(study, call, new)
        for member in new:
            result = read_result(call.workdir / member.name)
            if result is None and member.name not in handed_over:
                waiting.append(member)
            results[member.name] = result or Result(HANDED_OVER)
    return waiting


def conduct_study(study: Study, call: Call) -> int:
    """Run the unfinished members of a study, as far as possible; return the exit code.

    Raises:
      InputError: the config is none for a member; no member has been run.
    """
    results: dict[str, Result] = {}
    while new := [m for m in study.ready(results) if m.name not in results]:
        check_members(study, call, new)
        call.workdir.mkdir(parents=True, exist_ok=True)
        for member in new:
            code, results[member.name] = _bring_about(call, member)
            refused = code == exit_codes.INPUT_WRONG
            if not (refused and len(results) == 1):  # else nothing has been written
                _write_report(study, call, results)
            # The data of one member may be at fault while the others' are fine.
            others_go = refused and {FINISHED, HANDED_OVER} & {r.state for r in results.values()}
            if code in _ENDS_THE_STUDY and not others_go:
                print(f"{member.name} {_ENDS_THE_STUDY[code]}", file=sys.stderr)
                return code
    return _conclude(_write_report(study, call, results), call, results)


def _bring_about(call: Call, member: Member) -> tuple[int, Result]:
    """Run a member unless it has a result; return its exit code (0 if it is not run) and result.

    Only training goes through the launcher; `label` runs in one process, here.
    The code is 143 even with a result, if the study was told to stop meanwhile.
    """
    result = read_result(call.workdir / member.name)
    if result is not None:
        logger.info("%s: already %s", member.name, result.state)
        return exit_codes.DONE, result
    if member.name in _read_handed_over(call.workdir) and not call.again:
        return exit_codes.DONE, Result(HANDED_OVER)
    words = member_words(call, member)
    command = [sys.executable, "-m", "vit_jax.main", *words]
    shown = ["python", *command[1:]]
    launcher = call.launcher if member.command == "train" else None
    if launcher is not None:
        command = shown = [*launcher, "--", *words]
    logger.info("%s: %s", member.name, shlex.join(shown))
    code, last_lines, told_to_stop = _execute(command)
    # A member that had nearly ended when it was told to stop may still end normally.
    stopped = exit_codes.TERMINATED if told_to_stop else exit_codes.DONE
    result = read_result(call.workdir / member.name)
    if result is not None:
        return stopped, result
    if code == exit_codes.DONE and launcher is not None:
        record_handed_over(call.workdir, {member.name: shlex.join(shown)})
        return stopped, Result(HANDED_OVER)
    error = f"ended with exit code {code}\n{last_lines}".strip()
    return code if code in _ENDS_THE_STUDY else stopped or code, Result(FAILED, {}, error)


def _execute(command: Sequence[str]) -> tuple[int, str, bool]:
    """Run a command and wait for its end; SIGTERM to this process is passed on to it.

    Returns:
      Its exit code; the last lines of its standard error; whether SIGTERM came meanwhile.

    Raises:
      KeyboardInterrupt: on Ctrl-C, once the command has ended; it receives Ctrl-C too and may save.
    """
    last_lines: collections.deque = collections.deque(maxlen=_LAST_LINES)
    command = [reveal(word) for word in command]
    process, received = None, set()

    def note(number: int, _: types.FrameType | None) -> None:
        received.add(number)
        if number == signal.SIGTERM and process is not None:
            process.terminate()

    numbers = {signal.SIGTERM, signal.SIGINT}
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as nohup asks for
        numbers.remove(signal.SIGINT)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
        if signal.SIGTERM in received:
            process.terminate()
        with process:
            assert process.stderr is not None  # since it is a pipe
            for line in process.stderr:
                sys.stderr.write(line)
                last_lines.append(line)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    code = exit_codes.of_ended(process.returncode)
    return code, "".join(last_lines), signal.SIGTERM in received


def record_handed_over(workdir: epath.Path, commands: Mapping[str, str]) -> None:
    """Adds {member: command} to what was handed over in the study of `workdir`."""
    content = json.dumps({**_read_handed_over(workdir), **commands}, indent=2) + "\n"
    write_whole(workdir / _HANDED_OVER_FILE, content)


def _read_handed_over(workdir: epath.Path) -> dict[str, str]:
    """{member: command} for all members that were ever handed over.

    Raises InputError if the file is damaged: none is handed over twice.
    """
    path = workdir / _HANDED_OVER_FILE
    if not path.exists():
        return {}
    found = read_json(path, lambda commands: "".join(commands.values()))
    if found is None:
        raise InputError(f"{path}: is damaged; without it the study would start members again that "
                         "wait in a queue; if none does, remove it")  # fmt: skip
    return found


def find_differences(workdir: epath.Path, names: Iterable[str]) -> list[str]:
    """Warnings where members of one model and batch size recorded different microbatches."""
    alike: dict[str, dict[str, int]] = {}
    for name in names:
        path = workdir / name / "config.json"
        if (content := read_json(path, operator.itemgetter("resolved"))) is not None:
            c = content["resolved"]
            kind = json.dumps([c["model"], c["global_batch_size"], c["data"]["image_size"]])
            alike.setdefault(kind, {})[name] = c["optimizer"]["accum_steps"]
    return [
        "optimizer.accum_steps differs between devices, so results differ by rounding: "
        f"{', '.join(f'{value} in {name}' for name, value in values.items())}; set it"
        for values in alike.values()
        if len({*values.values()}) > 1
    ]


def find_extended(study: Study, call: Call, members: Iterable[Member]) -> list[str]:
    """Warnings of members that were trained longer than the study asks for."""
    found = []
    for member in members:
        path = call.workdir / member.name / "config.json"
        content = read_json(path, lambda config: config["asked"]["duration"])
        ran = None if content is None else content["asked"]["duration"]
        if ran not in (None, asked := study.config_of(member.overrides).duration):
            found.append(f"{member.name} was trained for {ran} instead of {asked}, so its row "
                         "does not compare with the others")  # fmt: skip
    return found


def _write_report(study: Study, call: Call, results: Results) -> Report:
    """Write study.json, study.md, study.csv and study.tex with the results so far."""
    found = Found(study, results)
    report = study.report(found)
    ended = [member for member in found.members if member.name in results]
    warnings = find_differences(call.workdir, results) + find_extended(study, call, ended)
    values = {**report.values, "warnings": warnings}
    table = as_latex([report.columns, *report.texts], report.note)
    files = {"study.csv": found.csv().encode(), "study.tex": table.encode(), **report.files}
    values["winner"] = _describe_winner(found, call, report.best) if report.best.names else None
    report = report._replace(values=values, files=files)
    members = {
        member.name: {**results[member.name]._asdict(), "command": _read_command(call, member)}
        for member in ended
    }
    content = {
        "study": study.config.study.name,
        "title": f"{call.config_file}: {study.config.study.name}",
        "axes": study.say_axes(),
        "metric": study.metric,
        "complete": report.is_complete,
        "columns": report.columns,
        "rows": report.texts,
        "table": report.rows,
        "best": report.best.names,
        **values,
        "members": members,
    }
    lines = [report.columns, ["---"] * len(report.columns), *report.texts]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    table = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
    commands = "\n".join(member["command"] for member in members.values())
    noted = f"{report.note}.\n\n" * bool(report.note)
    warned = "".join(f"Warning: {line}.\n\n" for line in values["warnings"])
    best = "".join(f"{x}\n\n" for x in _say_winner(values["winner"])) if report.best.names else ""
    text = (
        f"# {content['title']}\n\n{content['axes']}\n\n{table}\n\n{noted}{best}{warned}"
        f"The members:\n\n```sh\n{commands}\n```\n"
    )
    as_json = json.dumps(content, indent=2, default=Measured.numbers) + "\n"
    texts = {"study.md": text.encode(), "study.json": as_json.encode()}
    for name, file in {**texts, **files}.items():
        write_whole(call.workdir / name, file)
    return report


def _read_command(call: Call, member: Member) -> str:
    """The command by which a member was last started, else the one that would start it."""
    if starts := read_starts(call.workdir / member.name):
        return starts[-1]["command"]
    return shlex.join(["python", "-m", "vit_jax.main", *member_words(call, member)])


def _describe_winner(found: Found, call: Call, best: Best) -> dict[str, Any]:
    """The best members, by seeds: their place, mean metrics, workdirs, and the next commands."""
    names = best.names
    rows = [found.study.numbers_of(found.results[name]) for name in names]
    metrics = [name for name in rows[0] if "/" in name
               and all(row.get(name) is not None for row in rows)]  # fmt: skip
    place = next(without_seed(m) for m in found.members if m.name == names[0])
    workdir = [f"--workdir={call.workdir / names[0]}"]
    config = found.study.config
    of_best = ["--best"] * (config.study.point == "best")
    files = ",".join(plugins.path_of(name) for name in config.plugins)
    of_plugins = [f"--config.plugins={files}"] * bool(files)
    longer = {}
    if (call.workdir / names[0] / "config.json").exists():
        ran = stored_config.read_config(call.workdir / names[0])
        steps = found.results[names[0]].summary["step"]
        twice = config_lib.with_values(ran, {"duration": f"{2 * steps} steps"})
        command = branch_command(ran, twice, call.workdir / names[0], steps)
        longer["longer"] = " ".join([command, *map(shlex.quote, of_plugins)])
    return {
        "place": {key: value for key, value in place.items() if value != ""},
        "near": best.near,
        "values": {name: statistics.fmean(row[name] for row in rows) for name in metrics},
        "workdirs": [str(call.workdir / name) for name in names],
        "next": shlex.join(["vit_jax", "evaluate", *workdir, *of_best, *of_plugins]),
        **longer,
    }


def _say_winner(winner: Mapping[str, Any]) -> list[str]:
    """Lines about the best members."""
    place = ", ".join(f"{key} {value}" for key, value in winner["place"].items())
    near = [", ".join(f"{key} {value}" for key, value in other.items()
                      if value not in ("", winner["place"].get(key)))
            for other in winner["near"]]  # fmt: skip
    tied = [f"Not clearly best; within one standard deviation of it: {'; '.join(near[:5])}"]
    tied *= bool(near)
    workdirs = [f"Workdir: {workdir}" for workdir in winner["workdirs"]]
    best = f"Best: {place}: {readable(winner['values'])}"
    lines = [best, *tied, *workdirs, f"Next: {winner['next']}"]
    return [*lines, f"To train it longer: {winner['longer']}"] if "longer" in winner else lines


def print_table(report: Report, title: str | None = None) -> None:
    """Print the rows of a report."""
    table = Table(*(Column(Text(column), overflow="fold") for column in report.columns),
                  title=title)  # fmt: skip
    for row in report.texts:
        table.add_row(*map(Text, row))
    Console().print(table)


def _conclude(report: Report, call: Call, results: Results) -> int:
    """Print the results of a study; return the exit code."""
    print_table(report)
    if report.best.names:
        print("\n".join(_say_winner(report.values["winner"])))
    for name, result in results.items():
        if result.state in (FAILED, DIVERGED):
            print(f"{name} {result.state}: {result.error}", file=sys.stderr)
    for line in report.values["warnings"]:
        print(f"warning: {line}", file=sys.stderr)
    written = ["study.md", "study.json", *report.files]
    print(f"report: {', '.join(str(call.workdir / name) for name in written)}")
    if FAILED in {result.state for result in results.values()}:
        return exit_codes.FAILED
    if lacking := [name for name, result in results.items() if result.state == HANDED_OVER]:
        print(f"handed over and not finished: {', '.join(lacking)}; when they have finished, run "
              "the same command (--again hands them over once more if they are lost)")  # fmt: skip
    elif not report.is_complete:
        print("error: the study is incomplete: too many members diverged", file=sys.stderr)
        return exit_codes.FAILED
    return exit_codes.DONE
