"""What decides, beside the config, which program a run becomes."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform

# Whose versions may change what is computed, or the order in which is read.
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy",
            "tensorflow", "tensorflow-cpu", "tensorflow-datasets")  # fmt: skip
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # environment variables that the compilers read


def software() -> dict[str, str]:
    """{what: version} of this code, of Python and packages, and the flags of the compilers."""
    found = {"code of vit_jax": code_digest()[:16], "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    for name in FLAGS:
        # Where a host dumps what it compiles is its own affair.
        flags = [flag for flag in os.environ.get(name, "").split() if "dump" not in flag]
        found[name] = " ".join(sorted(flags))
    return found


def code_digest(root: pathlib.Path | None = None) -> str:
    """Of every source file of the package, or below `root`; without the configs in a wheel."""
    root = root or pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(set(root.rglob("*.py")) - set((root / "configs").rglob("*.py"))):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
