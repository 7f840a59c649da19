"""Software versions and flags that, together with the config, determine a run's program."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform

# Packages whose version may change the computation or the order in which data are read.
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy",
            "tensorflow", "tensorflow-cpu", "tensorflow-datasets")  # fmt: skip
# The compiler for GPUs and its libraries, which are named where they are installed.
CUDA_PACKAGES = (
    "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "nvidia-cublas-cu12", "nvidia-cublas", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc",
)  # fmt: skip
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # environment variables read by the compilers


def software() -> dict[str, str]:
    """{name: version} of this code, Python and packages, and {name: value} of compiler flags."""
    found = {"code of vit_jax": code_digest()[:16], "Python": platform.python_version()}
    for name in PACKAGES + CUDA_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed"
    for name in FLAGS:
        # Hosts may dump compiled programs to different places.
        flags = [flag for flag in os.environ.get(name, "").split() if "dump" not in flag]
        found[name] = " ".join(sorted(flags))
    return found


def code_digest(root: pathlib.Path = pathlib.Path(__file__).parents[1]) -> str:
    """Digest of all source files of the package, or below `root`; without a wheel's configs."""
    digest = hashlib.sha256()
    for path in sorted(set(root.rglob("*.py")) - set((root / "configs").rglob("*.py"))):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
