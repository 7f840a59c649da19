"""A stand-in for `python -m vit_jax.main` that ends as the study's file `fate.json` demands.

`fate.json` maps members to fates: {"dev_lr_0.1": "signal 9"}, "exit 1", "diverge" or "later" (exits
with 0, unfinished). A member without a fate finishes, with its learning rate as accuracy. The
prefix "stop, " first sends SIGTERM to the study, which the member ignores. Each call appends a line
to `calls.txt`. It works after a launcher's `--` as well.
"""

import json
import os
import pathlib
import signal
import sys
import time

words = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv if "=" in word)
workdir = pathlib.Path(words["workdir"])
with (workdir.parent / "calls.txt").open("a") as calls:
    calls.write(f"{workdir.name}\n")
fates = workdir.parent / "fate.json"
fate = json.loads(fates.read_text()).get(workdir.name, "") if fates.exists() else ""
if fate.startswith("stop, "):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.2)  # until the study has forwarded the signal
    fate = fate.removeprefix("stop, ")
if fate.startswith("exit"):
    print(f"error: {workdir.name} cannot", file=sys.stderr)
    sys.exit(int(fate.split()[1]))
if fate.startswith("signal"):
    os.kill(os.getpid(), int(fate.split()[1]))
if fate == "later":
    sys.exit(0)
workdir.mkdir()
if fate == "diverge":
    (workdir / "diverged.json").write_text('{"error": "step 3: loss is nan"}')
    sys.exit(1)
lr = float(words["config.optimizer.peak_lr"])
(workdir / "summary.json").write_text(json.dumps({"step": 20, "held_out/top1": lr}))
