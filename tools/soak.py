"""Shows how the memory of a run grows; makes the table of docs/explanation/runs.md. Linux only.

python tools/soak.py DIR WORKDIR [IMAGES]

DIR holds CIFAR-10 as TFDS prepares it. A model so small that reading is most of the work trains on
IMAGES images (10 million), with 100 evaluations and saves, and prints a line with each: MiB of
resident memory, of memory that the C library has given out, and of memory that it keeps free; and
the numbers of threads, open files, arrays of JAX and blocks of Python.
"""

import ctypes
import logging
import os
import sys

import jax

import vit_jax

BATCH, TIMES = 1000, 100
MODEL = {"name": "ViT-mu/16", "width": 16, "depth": 1, "mlp_dim": 32, "num_heads": 1}


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later; what it calls them, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def read_memory():
    """{name: number}, as the module says."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    given_out = info.uordblks + info.hblkhd
    mib = {"resident": resident, "given out": given_out, "free": info.fordblks}
    return {name: size // 2**20 for name, size in mib.items()} | {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "arrays": len(jax.live_arrays()),
        "blocks": sys.getallocatedblocks(),
    }


def say(step, state, metrics):
    if any(name.startswith("test/") for name in metrics):
        shown = ", ".join(f"{name} {number:,}" for name, number in read_memory().items())
        print(f"{step * BATCH:,} images: {shown}", flush=True)


def main(data_dir, workdir, images="1e7"):
    steps = int(float(images)) // BATCH
    every = f"{steps // TIMES} steps"
    keys = {
        "data.data_dir": data_dir,
        "data.ops": "decode|flip",
        "global_batch_size": BATCH,
        "duration": f"{steps} steps",
        "log.every": f"{max(steps // TIMES // 5, 1)} steps",
        "checkpoint.every": every,
        "evals.test.every": every,
        "model.dropout": 0.0,
    }
    keys |= {f"model.{name}": value for name, value in MODEL.items()}
    logging.getLogger("vit_jax").setLevel(logging.WARNING)
    vit_jax.train("cifar10", workdir, keys, [say])


if __name__ == "__main__":
    main(*sys.argv[1:])
