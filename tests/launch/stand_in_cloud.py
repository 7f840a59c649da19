"""The Cloud TPU VMs of stand_in/gcloud, for tests: settings, calls, and workers."""

import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import subprocess

RESOURCES = ["compute", "tpus", "queued-resources"]
STAND_IN = pathlib.Path(__file__).parent / "stand_in"


@functools.cache
def stand_in():
    """The program stand_in/gcloud as a module."""
    loader = importlib.machinery.SourceFileLoader("stand_in_gcloud", str(STAND_IN / "gcloud"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


class Cloud:
    """Settings of the stand-in, and the calls it received."""

    def __init__(self, folder):
        self.folder = folder

    def play(self, *states):
        (self.folder / "next").write_text("\n".join(states))

    def job(self, script):
        """The program that replaces `python` on the workers."""
        path = self.folder / "job"
        path.write_text(f"#!/usr/bin/env bash\n{script.replace('PLAYS', str(self.folder))}\n")
        path.chmod(0o755)

    def fail(self, *calls):
        """Calls that the network fails, e.g. "ssh 2": the second call of ssh."""
        (self.folder / "failing").write_text("\n".join(calls))

    def calls(self, verb=None):
        """The words after each verb, for the calls so far."""
        path = self.folder / "calls"
        calls = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(call[:3] == RESOURCES for call in calls)
        return [call[4:] if verb else call[3] for call in calls if verb in (None, call[3])]

    def run(self, command, *, capture_output=False, text=False):
        """subprocess.run; gcloud is the stand-in, called in this process."""
        program, *words = command
        if program != "gcloud":
            return subprocess.run(command, capture_output=capture_output, text=text)
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                stand_in().main(words)
            except SystemExit as e:
                code = e.code
        printed = [stream.buffer.getvalue() for stream in (out, err)]
        if not capture_output:
            print(b"".join(printed).decode())
        elif text:
            printed = [stream.decode() for stream in printed]
        return subprocess.CompletedProcess(command, code, *printed)

    def workers(self):
        return sorted(path.name for path in self.folder.glob("[0-9]*-[0-9]*"))
