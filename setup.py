"""Installs vit_jax: `pip install -e .`, with the extras test, docs, report, tpu, cuda, parquet,
plan, gcs, wandb, text, onnx, litert, curation."""

import glob
import os
import re

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

REPORT = ["bokeh>=3.9.0", "jinja2>=3.1.6"]  # Bokeh needs 45 MB on disk
WANDB = "wandb>=0.31.0"
PARQUET = "pyarrow>=20.0.0"
GCS = ["google-cloud-storage>=3.0.0", "google-cloud-storage-control>=1.0.0"]  # required by orbax
TEXT = ["ftfy>=6.3.1", "sentencepiece>=0.2.1", "tokenizers>=0.22.0"]
# jax2onnx 0.13 is the last release that works with orbax-checkpoint above 0.11.36.
ONNX = ["jax2onnx>=0.13.0,<0.14", "onnxruntime>=1.24.1"]
# ai-edge-litert needs backports-strenum; its release 1.3 does not install with Python 3.11, but uv
# would choose it.
LITERT = ["ai-edge-litert>=2.1.0", "backports-strenum<1.3"]
# Beam, of prepare --beam, is not in `test`: it needs older packages than the pinned ones.
BEAM = "apache-beam>=2.77.0"
CURATION = ["cleanlab>=2.9.0", "usearch>=2.26.0"]  # doctor --init_from, duplicates --features
LIBTPU = "libtpu>=0.0.51; sys_platform == 'linux' and platform_machine == 'x86_64'"

with open("vit_jax/__init__.py") as file:  # not imported: an old Python could not say why it fails
    VERSION = re.search(r'__version__ = "(.+)"', file.read())[1]

CONFIGS = sorted(glob.glob("configs/*.py"))


class BuildWithConfigs(build_py):
    """Copy the configs into a wheel's package; an editable install finds them in the clone."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = os.path.join(self.build_lib, "vit_jax", "configs")
            self.mkpath(folder)
            for path in CONFIGS:
                self.copy_file(path, folder)

    def get_source_files(self):
        return [*super().get_source_files(), *CONFIGS]


# Lower bounds are versions that tests/smoke.txt and the quickstart have passed with, all together.
setup(
    name="vit_jax",
    version=VERSION,
    description="Pretrain Vision Transformers at TPU scale and carry them over to new tasks.",
    license="Apache-2.0",
    packages=find_packages(include=["vit_jax", "vit_jax.*"]),
    # With this line an editable install is an entry in a .pth file. Without it, it is an import
    # hook, which fails if the working directory holds a folder called vit_jax, e.g. the clone.
    package_dir={"": "."},
    package_data={
        "vit_jax.diagnosis": ["reference_curves/*.json"],
        "vit_jax.insight": ["page/*"],
        "vit_jax.planning": ["recipe_costs.csv"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["vit_jax = vit_jax.main:execute_and_exit"]},
    python_requires=">=3.11",
    install_requires=[
        "array_record>=0.8.6; sys_platform == 'linux'",  # the platforms of tensorflow-datasets
        "einops>=0.8.1",
        "etils[epath,epy]>=1.13.0",
        "flax>=0.12.4",
        "huggingface_hub>=1.0.1",
        "jax>=0.10.0",
        "matplotlib>=3.10.0",
        "ml_collections>=1.1.0",
        "importlib_resources>=7.1.0",  # tensorflow-datasets needs it to prepare a data set
        "ml_dtypes>=0.5.4",
        "numpy>=2.3.5",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.12.5,<1.0",  # 1.0 takes away the interface that checkpoints/ uses
        "pillow>=12.1.1",
        "psutil>=7.0.0",
        "pyyaml>=6.0.2",
        "rich>=14.0.0",
        "safetensors>=0.6.2",
        "scikit-learn>=1.7.2",
        "scipy>=1.16.3",
        "tensorboard>=2.20.0",
        # TensorFlow reads data, on the CPU only; platforms without a CPU build take the full one.
        "tensorflow-cpu>=2.20.0; sys_platform == 'linux' and platform_machine == 'x86_64'",
        "tensorflow>=2.20.0; sys_platform != 'linux' or platform_machine != 'x86_64'",
        "tensorflow-datasets>=4.9.10",
    ],
    extras_require={
        "test": [
            "axe-playwright-python>=0.1.4",  # carries axe-core, which checks a page's accessibility
            "jsonschema>=4.26.0",
            "kubernetes-validate>=1.37.0",
            "mypy>=2.4.1",
            "playwright>=1.60.0",  # drives the machine's own Chromium
            "pytest>=9.0.0",
            "pytest-xdist>=3.8.0",
            "ruff>=0.15.0",
            "setuptools>=77",  # builds a wheel
            "trustme>=1.2.1",
            LIBTPU,
            PARQUET,
            WANDB,
            *CURATION,
            *LITERT,
            *ONNX,
            *REPORT,
            *TEXT,
        ],
        "curation": [BEAM, *CURATION],
        "docs": ["mkdocs>=1.6.1", "mkdocs-material>=9.8.1", "mkdocstrings[python]>=1.0.8"],
        "litert": LITERT,  # export --format=litert
        "onnx": ONNX,  # export --format=onnx
        "parquet": [PARQUET],  # and Arrow files, and hf:OWNER/NAME
        "plan": [LIBTPU],
        "report": REPORT,
        "text": TEXT,  # tokenizers of image-text models
        "wandb": [WANDB],
        "gcs": GCS,
        "tpu": ["jax[tpu]>=0.10.2"],
        "cuda": ["jax[cuda13]>=0.10.2"],
    },
)
