"""Installs vit_jax: `pip install -e .`, with the extras test, tpu, cuda, plan, gcs, wandb."""

import glob
import os
import runpy

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

WANDB = "wandb>=0.31.0"
GCS = ["google-cloud-storage>=3.0.0", "google-cloud-storage-control>=1.0.0"]  # what orbax needs
LIBTPU = "libtpu>=0.0.51; sys_platform == 'linux' and platform_machine == 'x86_64'"

CONFIGS = sorted(glob.glob("configs/*.py"))


class BuildWithConfigs(build_py):
    """Puts the configs into the package of a wheel; an editable install has them beside it."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = os.path.join(self.build_lib, "vit_jax", "configs")
            self.mkpath(folder)
            for path in CONFIGS:
                self.copy_file(path, folder)

    def get_source_files(self):
        return [*super().get_source_files(), *CONFIGS]


# Lower bounds are the versions that the tests have passed with; none is older.
setup(
    name="vit_jax",
    version=runpy.run_path("vit_jax/__init__.py")["__version__"],
    description="Pretrain Vision Transformers at TPU scale and carry them over to new tasks.",
    license="Apache-2.0",
    packages=find_packages(include=["vit_jax", "vit_jax.*"]),
    # An editable install is then a line in a .pth file. Otherwise it is an import hook, and finds
    # nothing where the working directory holds a folder called vit_jax, such as the clone itself.
    package_dir={"": "."},
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["vit_jax = vit_jax.main:execute_and_exit"]},
    python_requires=">=3.11",
    install_requires=[
        "array_record>=0.8.6; sys_platform == 'linux'",  # wherever tensorflow-datasets has it
        "einops>=0.8.2",
        "etils[epath,epy]>=1.15.0",
        "flax>=0.12.8",
        "jax>=0.10.2",
        "matplotlib>=3.10.0",
        "ml_collections>=1.1.0",
        "importlib_resources>=7.1.0",  # of tensorflow-datasets, to prepare a data set
        "ml_dtypes>=0.6.0",
        "numpy>=2.4.6",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "pillow>=13.0.0",
        "psutil>=7.2.2",
        "pyyaml>=6.0.3",
        "rich>=15.0.0",
        "safetensors>=0.8.0",
        "scikit-learn>=1.9.1",
        "tensorboard>=2.21.0",
        # TensorFlow reads data, on the CPU only; where there is no CPU build, the full one does.
        "tensorflow-cpu>=2.21.0; sys_platform == 'linux' and platform_machine == 'x86_64'",
        "tensorflow>=2.21.0; sys_platform != 'linux' or platform_machine != 'x86_64'",
        "tensorflow-datasets>=4.9.10",
    ],
    extras_require={
        "test": [
            "jsonschema>=4.26.0",
            "kubernetes-validate>=1.37.0",
            "mypy>=2.4.1",
            "pytest>=9.0.0",
            "pytest-xdist>=3.8.0",
            "ruff>=0.15.0",
            "setuptools>=77",  # builds a wheel
            LIBTPU,
            WANDB,
        ],
        "plan": [LIBTPU],
        "wandb": [WANDB],
        "gcs": GCS,
        "tpu": ["jax[tpu]>=0.10.2"],
        "cuda": ["jax[cuda13]>=0.10.2"],
    },
)
