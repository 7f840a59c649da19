"""Makes this folder: a run stopped at step 3 of 6, and what it comes to if nothing stops it.

From a checkout of commit 918fdf2, with this file in it:

PYTHONPATH=$PWD python tests/golden/older_run/make.py

`get_config` is the experiment; `data.data_dir` has to be given.
"""

import hashlib
import json
import os
import pathlib
import shutil
import signal
import tempfile

import numpy as np
import PIL.Image

from vit_jax.config import base_config, classification

FOLDER = pathlib.Path(__file__).parent


def get_config(arg=""):
    c = base_config()
    c.seed, c.global_batch_size, c.duration = 3, 8, "6 steps"
    c.model.name, c.model.patch_size = "ViT-mu/16", 4
    c.model.width, c.model.mlp_dim, c.model.num_heads = 8, 16, 2
    c.model.pool, c.model.dropout = "gap", 0.1
    c.data.name, c.data.image_size = "folder", 8
    c.data.ops = "inception_crop(area_min=0.5)|flip"
    c.evals.val = classification(split="val", every="3 steps", ops="decode|resize")
    c.optimizer.peak_lr, c.optimizer.weight_decay, c.optimizer.ema_decay = 1e-2, 0.05, 0.5
    c.schedule.warmup, c.checkpoint.every, c.log.every = "1 steps", "3 steps", "1 steps"
    return c


def machine():
    """What decides the bits of a run on CPUs."""
    import jaxlib
    import tensorflow

    info = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.partition(":")[2].split() for line in info if line.startswith("flags"))
    return {
        "jaxlib": jaxlib.__version__,
        "tensorflow": tensorflow.__version__,
        "cpu_flags_sha256": hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest(),
    }


def make_pictures():
    rng = np.random.default_rng(0)
    for i in range(20):
        path = FOLDER / "pictures" / ("ant", "bee")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(path)


def parameters(workdir):
    """{"params/...": array, "ema/...": array} of the newest checkpoint."""
    import jax
    import orbax.checkpoint as ocp

    from vit_jax import tree

    step = max(int(path.name) for path in (workdir / "checkpoints").iterdir())
    path = workdir / "checkpoints" / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        leaves = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
        state = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    names = tree.flatten_names({key: state[key] for key in ("params", "ema")})
    return {name: np.asarray(leaf) for name, leaf in names.items()}


def last_row(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    last = {}
    for row in rows:
        last = last | row if row["step"] == last.get("step") else row
    return {name: value for name, value in last.items() if not name.startswith("time/")}


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from vit_jax import metrics
    from vit_jax.training.train import Preempted, train_and_evaluate

    make_pictures()
    config = get_config()
    config.data.data_dir = str(FOLDER / "pictures")
    with tempfile.TemporaryDirectory() as whole:
        train_and_evaluate(config, whole)
        whole = pathlib.Path(whole)
        np.savez_compressed(FOLDER / "finished.npz", **parameters(whole))
        finished = {"machine": machine(), "metrics": last_row(whole)}
    (FOLDER / "finished.json").write_text(json.dumps(finished, indent=2) + "\n")

    before = metrics.Profiler.before

    def stop_before(self, step):
        before(self, step)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    metrics.Profiler.before = stop_before
    config.data.data_dir = "pictures"
    os.chdir(FOLDER)
    shutil.rmtree("workdir", ignore_errors=True)
    try:
        train_and_evaluate(config, "workdir")
    except Preempted as e:
        print(e)


if __name__ == "__main__":
    main()
