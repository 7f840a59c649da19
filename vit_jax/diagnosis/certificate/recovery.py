"""Whether a run that was killed and went on ends with the bits of one that was not."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

from etils import epath

from vit_jax.checkpoints.restore import read_meta
from vit_jax.diagnosis.certificate import NotRunError, part_file
from vit_jax.diagnosis.certificate.context import Context

_STEPS, _KILLED_AT, _SAVED_EVERY = 20, 13, 5
_IMAGES = 64  # of a batch, or one a device


def kill_and_resume(context: Context) -> dict[str, Any]:
    """Train 20 steps, and once more with SIGKILL after step 13; this process has no devices."""
    if importlib.util.find_spec("tensorflow") is None:
        raise NotRunError("TensorFlow, which reads the run's images, is not installed")
    folder = context.output / "recovery"
    if context.is_first:
        folder.rmtree(missing_ok=True)
    whole, killed = folder / "whole", folder / "killed"
    inject = f"--config.job.inject=kill:process=0:step={_KILLED_AT}"
    codes = [
        _train(context, whole),
        _train(context, killed, inject),
        _train(context, killed, inject),  # the fault is made once
    ]
    if not context.is_first:  # which alone compares
        return {}
    if codes[0] or not codes[1] or codes[2]:
        return {"held": False, "said": f"the runs ended with {codes}, not with 0, a kill and 0"}
    sums = [read_meta(each / "checkpoints" / str(_STEPS))["checksums"] for each in (whole, killed)]
    same = sums[0] == sums[1]
    folder.rmtree(missing_ok=True)
    said = f"{_STEPS} steps, killed after step {_KILLED_AT} and resumed: "
    said += "the bits of a run that was not killed" if same else "other bits"
    return {"steps": _STEPS, "killed_at": _KILLED_AT, "held": same, "said": said}


def _train(context: Context, workdir: epath.Path, *more: str) -> int:
    """The exit code of a run of the quickstart's model, on any number of devices."""
    devices = part_file(context.output, "devices")
    number = json.loads(devices.read_text())["num_devices"] if devices.exists() else 1
    words = [
        "--config=quickstart:debug", f"--workdir={workdir}", f"--config.duration={_STEPS} steps",
        f"--config.checkpoint.every={_SAVED_EVERY} steps", "--config.evals.test=None",
        f"--config.global_batch_size={number * max(1, _IMAGES // number)}",
        "--config.mesh.deterministic=true", "--quiet", *context.words, *more,
    ]  # fmt: skip
    return subprocess.run([sys.executable, "-m", "vit_jax.main", *words]).returncode
