"""The run of version 0.2.0 that every later version resumes: `tests/golden/run_0_2_0`.

`python tests/stored_run.py` has recorded it. A later version adds a run of its own beside it where
it adds what this one lacks, and changes none; facts.json may get further facts.
"""

import hashlib
import json
import pathlib
import platform
import shutil
import tempfile

import jax
import numpy as np
from asked import prepare
from finished_run import final_state

from vit_jax import data
from vit_jax.base import tree
from vit_jax.base.files import write_whole
from vit_jax.config.stored import read_asked
from vit_jax.devices.mesh import batch_sharding
from vit_jax.job.software import software
from vit_jax.transfer import load_pretrained

STORED = pathlib.Path(__file__).parent / "golden" / "run_0_2_0"
SAVED, LAST = 30, 40  # the step that is resumed, and the end of the run
WORDS = (
    "--config=quickstart:debug",
    "--config.model.dropout=0.1",
    "--config.optimizer.ema_decay=0.9",
)


def digests_of_state(workdir: pathlib.Path) -> dict[str, str]:
    """{leaf name: digest} of the newest checkpoint in `workdir`."""
    _, state = final_state(workdir)
    return {name: _digest(leaf) for name, leaf in state.items()}


def digests_of_batches(workdir: pathlib.Path) -> dict[str, list[str]]:
    """{batch key: a digest for each step after `SAVED`} of the global batches of a run."""
    run = prepare(read_asked(workdir), workdir)
    batches = data.train_batches(
        run.train_source,
        run.experiment.batch,
        steps=range(SAVED, LAST),
        seed=run.settings.run.seed,
        sharding=batch_sharding(run.mesh),
        data_order=run.order,
    )
    found: dict[str, list[str]] = {}
    for batch in batches:
        for name, values in tree.flatten_names(batch).items():
            found.setdefault(name, []).append(_digest(values))
    return found


def logits_of(workdir: pathlib.Path) -> np.ndarray:
    """The logits of the newest checkpoint for four fixed images, by the running average."""
    model, variables = load_pretrained(workdir)
    grid = np.indices((8, 8, 3)).sum(axis=0)
    images = np.stack([np.cos(0.3 * (i + 1) * grid) for i in range(4)]).astype(np.float32)
    return np.asarray(jax.jit(model.apply)(variables, images))


def machine_and_build() -> dict[str, str]:
    """What two runs must share to have equal bits: the type of CPU, and the compiler."""
    text = pathlib.Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    cpu = [line for line in text.splitlines() if line.startswith(("model name", "flags"))][:2]
    build = {name: software()[name] for name in ("jax", "jaxlib", "flax", "optax", "XLA_FLAGS")}
    return build | {"CPU": _digest(np.frombuffer("\n".join(cpu).encode(), np.uint8))}


def _digest(values) -> str:
    array = np.asarray(values)
    return hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()[
        :16
    ]


def record() -> None:
    """Train the run, and keep what a job leaves that is killed after the save of step `SAVED`."""
    from vit_jax.main import main

    workdir = pathlib.Path(tempfile.gettempdir()) / STORED.name
    main([*WORDS, f"--workdir={workdir}"])
    facts = {"machine_and_build": machine_and_build(), "last_state": digests_of_state(workdir)}
    shutil.rmtree(workdir / "checkpoints" / str(LAST))
    for lost in (workdir / "summary.json", *workdir.glob("events.*")):
        lost.unlink()
    shutil.move(workdir, STORED)
    facts |= {"saved_state": digests_of_state(STORED), "batches": digests_of_batches(STORED)}
    facts["logits"] = logits_of(STORED).tolist()
    write_whole(STORED / "facts.json", json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    record()
