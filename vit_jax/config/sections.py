"""The sections of a config: their keys, with types, defaults, meanings and ranges.

`data` and `study` have files of their own.

A key that is None is either required (`base.REQUIRED`) or optional; the meaning of an optional key
says what None means. Durations are strings with a unit: "90 epochs", "10000 steps", "5e6
examples", or "5 %", a share of the run. Parts that are chosen by name add their own keys: see
`registries`.
"""

import os
from typing import ClassVar

from vit_jax.config.data_section import Data
from vit_jax.config.drawn import PATCHES
from vit_jax.config.parts import BATCH, FROM_0, POSITIVE, OpenSection, Section, key
from vit_jax.config.study import Study

Texts = tuple[str, ...]


class Run(Section):
    """The run."""

    seed: int = key(
        0, "of the data order, the initial weights, augmentation and dropout",
        within="[0, 4294967295]",
    )  # fmt: skip
    global_batch_size: int = key(None, "over all hosts and devices", within=BATCH, decided=True)
    duration: int = key(
        None, 'length of the run: "90 epochs", "10000 steps" or "5e6 examples"', form="length",
        decided=True,
    )  # fmt: skip
    init_from: str | None = key(
        None,
        "initial weights: a workdir, file, address or name; None or 'scratch': random weights; "
        "'': must be set by the user",
    )
    init_texts_from: str | None = key(None, "source of a text tower; None: init_from")
    init_head: str = key(
        "new", "of init_from: keep its head, or make a new one", choices=("new", "kept")
    )
    init_resize: str | None = key(None, "how to resample positions; None: as init_from's library")
    init_fields: str = key(
        "config",
        "source: init_from gives the image size and the model's fields where these are None, "
        "and the channels and the value range where they have their defaults",
        choices=("config", "source"),
    )
    plugins: Texts = key((), "the user's own modules, imported before other keys are read")
    auto: bool = key(
        True,
        "on TPUs and GPUs, give mesh.data, mesh.fsdp, model.scan, model.remat and "
        "model.remat_layers the fastest values that fit, where they have their defaults",
    )

    def check(self) -> list[str]:
        is_scratch = self.init_from in (None, "scratch")
        if self.init_from == "":
            or_scratch = "" if self.init_fields == "source" else ", or --config.init_from=scratch"
            return [
                "init_from: not set; give --config.init_from=SOURCE (a workdir, a file or the name "
                f"of published weights){or_scratch}"
            ]
        text = (
            f"init_fields='source': init_from={self.init_from!r} has no fields; give "
            "--config.init_from=SOURCE, or train from scratch with --config.init_fields=config and "
            "--config.data.image_size=..."
        )
        return [text] * (self.init_fields == "source" and is_scratch)

    @property
    def weights_source(self) -> str | None:
        """Source of the initial weights; None: random weights."""
        return None if self.init_from == "scratch" else self.init_from


class Model(OpenSection):
    """The model. Its family adds keys; None means the family's default, or as the name says."""

    name: str = key(None, "such as ViT-B/16, BiT-R50x1 or EfficientNet-B0", decided=True)
    kernels: str = key(
        "auto",
        "the form of the blocks; auto: measured at the first start if attention has a kernel, else "
        "calculated; calculated: the best by compilers' estimates; plain: by XLA",
        choices=("auto", "calculated", "plain", "products", "biases", "attention", "rows", "norms",
                 "cudnn"),
    )  # fmt: skip
    dtype: str = key("float32", "for computations; parameters are always float32")
    keep_tokens_until: int | None = key(
        None, "duration after which training encodes all patches; None: keep_tokens of them to "
        "the end", form="duration",
    )  # fmt: skip
    patch_sizes: int | None = key(
        None, f'drawn for each step, "{PATCHES}", among them patch_size, which the parameters '
        "and evaluations have; None: all steps have it", form="draws", example=PATCHES,
    )  # fmt: skip


class Objective(Section):
    """The loss over a batch."""

    name: str = key("supervised", "an objective")


class Loss(Section):
    """The loss of one example, where an objective learns labels."""

    excludes: ClassVar[bool | None] = None  # see `objectives.losses.Loss`

    name: str = key("softmax", "a loss")
    label_smoothing: float = key(0.0, "share of the target spread over classes", within="[0, 1)")
    class_weights: str | None = key(
        None, '"balanced", or one number per class with commas; None: no weights'
    )
    z_loss: float = key(
        0.0, "weight of log(Z)^2, Z the denominator of the softmax; 0: off", within=FROM_0
    )


class Optimizer(Section):
    """The optimizer, gradient accumulation and the running average."""

    averages: ClassVar[bool] = False  # see `experiment.optimizers.optimizers.Optimizer`

    name: str = key("adamw", "an optimizer")
    peak_lr: float = key(
        None, "the largest learning rate of the schedule", within=FROM_0, decided=True
    )
    weight_decay: float = key(0.0, "multiplied by the current learning rate", within=FROM_0)
    weight_decay_end: float | None = key(
        None,
        "weight decay at the end of the run, reached by half a cosine; None: it stays the same",
        within=FROM_0,
    )
    head_decay: float | None = key(
        None,
        "weight decay of the head's kernel / weight decay of other parameters; None: 1",
        within=FROM_0,
    )
    embedding_rate: float | None = key(
        None,
        "learning rate of the patch embedding / the rate it would have otherwise; None: 1",
        within=FROM_0,
    )
    l2: float = key(
        0.0, "this factor of a parameter is added to its gradient, before clipping", within=FROM_0
    )
    weight_decay_on: str = key(
        ".*/kernel", "regex over whole parameter names; of l2 too", form="regex"
    )
    grad_clip_norm: float | None = key(None, "global norm; None: no clipping", within=POSITIVE)
    layer_decay: float | None = key(
        None, "a layer's rate / the next layer's; None: 1", within="(0, 1]"
    )
    text_layer_decay: float | None = key(
        None, "the same of the text tower that an objective trains; None: 1", within="(0, 1]"
    )
    freeze: str | None = key(None, "regex, e.g. encoder/layer_0/.*; None: nothing", form="regex")
    last_layers: int | None = key(
        None,
        "train only so many last layers and what follows them, by setting `freeze`; None: all",
        within=POSITIVE,
    )
    accum_steps: int = key(
        None,
        "gradient accumulation: microbatches whose gradients are summed before an update; None: "
        "chosen when the run starts, as 1, or so that the activations of a microbatch stay in the "
        "cache of a CPU, or its tokens in the VMEM of a TPU",
        within=POSITIVE,
        decided=True,
    )
    on_spike: str | None = key(
        None,
        "when a loss or gradient norm is not finite or far above the last ones: skip the batch, or "
        "also lower (halve) the rate from there on; None: only what is not finite ends the run",
        choices=("skip", "lower"),
    )
    sam_radius: float | None = key(
        None,
        "SAM, for any optimizer, with two gradients in a step: the second is taken at this "
        "distance, where the loss rises most, e.g. 0.05; None: off",
        within=POSITIVE,
    )
    ema_decay: float | None = key(
        None, "running average of the parameters; None: off", within="(0, 1)"
    )
    ema_decay_end: float | None = key(
        None,
        "decay at the end of the run, reached by half a cosine, for an average that is a "
        "teacher; None: the decay is constant, and smaller in the first steps",
        within="(0, 1]",
    )

    def check(self) -> list[str]:
        if self.ema_decay_end is None or self.ema_decay is not None:
            return []
        return [
            f"ema_decay_end={self.ema_decay_end}: needs optimizer.ema_decay at the start of the "
            "run; None keeps the decay constant"
        ]


class Schedule(Section):
    """The learning rate over time."""

    name: str = key("cosine", "its decay after the warm-up")
    start: int = key(
        "0 steps", "where it begins: with a branch, at the step of its run", form="duration"
    )
    lowered: float = key(
        1.0, "set by a branch: the share of the scheduled rate that optimizer.on_spike=lower had "
        "left; optimizer.peak_lr includes it", within="(0, 1]",
    )  # fmt: skip
    warmup: int = key("0 steps", "linear from 0 at the start", form="duration")
    cooldown: int = key(
        "0 steps", "to 0 at the end, on top of the decay: linear, but for wsd", form="duration"
    )
    rule: str | None = key(
        None,
        "how to set duration, optimizer.peak_lr and schedule.warmup from the number of "
        "examples, where these have their defaults: bit; None: they must be set",
    )


class Mesh(Section):
    """Sizes of the mesh axes; -1: all remaining devices."""

    replica: int | None = key(None, "across TPU slices; None: the number of slices")
    data: int | None = key(
        None, "splits batches and the optimizer's state; None: -1, or as `auto` chooses"
    )
    fsdp: int | None = key(None, "splits parameters too; None: 1, or as `auto` chooses")
    shares: bool = key(
        True, "on TPUs, unrolled ViTs over fsdp gather all weights once a step, and send gradients "
        "behind computation; False: layer by layer, slower and in less memory", before=False,
    )  # fmt: skip
    tensor: int = key(1, "splits heads and inner channels")
    platform: str | None = key(
        None, "cpu, gpu or tpu; None: the best available", choices=("cpu", "gpu", "tpu")
    )
    deterministic: bool = key(
        False, "on GPUs, steps that give the same bits every time, more slowly; other devices "
        "always do"
    )  # fmt: skip


class Checkpoint(Section):
    """Which checkpoints are saved and kept."""

    every: int = key("1000 steps", "between two saves", form="interval")
    keep_last: int = key(
        2, "number of newest checkpoints to keep, as the newest may be damaged", within="[2, inf)"
    )
    keep_every: int | None = key(
        None, "interval of saves to keep for ever; None: off", form="interval"
    )
    memory_every: int | None = key(
        None, "interval of copies in the hosts' memory, for a quick restart; None: off",
        form="interval",
    )  # fmt: skip
    memory_dir: str = key(
        "/dev/shm", "folder of each host for these copies; on a local disk they outlive a pod"
    )
    keep_best: str | None = key(
        None, "metric, such as val/top1, whose best step so far is saved and kept; None: off"
    )

    def check(self) -> list[str]:
        folder = self.memory_dir
        text = f"memory_dir={folder!r}: must be an absolute path of a folder on each host"
        return [] if os.path.isabs(folder) else [text]


class Stop(Section):
    """When a run stops early."""

    metric: str | None = key(None, "metric of an evaluator, such as val/loss; None: off")
    patience: int = key(
        5, "evaluations in a row without a better value that end the run", within=POSITIVE
    )


class Log(Section):
    """The rows and traces that a run logs."""

    every: int = key("50 steps", "between two rows of metrics", form="interval")
    metrics: Texts | None = key(
        None, "names of metrics of the labels, in training; None: top1, where images have one label"
    )
    wandb: str | None = key(None, "project in Weights & Biases; None: off")
    by_layer: bool = key(False, "log norms of each layer; costs a backward pass per logged row")
    profile: str | None = key(None, '"10:15" traces steps 11 to 15; None: off')


class Job(Section):
    """A run's processes: their deadlines, in seconds, and checks of the hardware."""

    join_deadline_s: int = key(1800, "until all processes have started")
    heartbeat_s: int = key(100, "a process silent for this long counts as dead", within=POSITIVE)
    step_deadline_s: float | None = key(
        None, "None: 0.6 * heartbeat_s; one process: an hour", within=POSITIVE
    )
    compile_deadline_s: float = key(3600.0, "each phase before the first step", within=POSITIVE)
    evaluation_deadline_s: float = key(3600.0, "each evaluator", within=POSITIVE)
    save_deadline_s: float = key(
        3600.0, "each save, and stopping the threads that read ahead", within=POSITIVE
    )
    replay_every: int | None = key(
        None,
        "between two replays: steps whose gradients are computed twice, on two devices, and "
        "compared bit by bit; None: off",
        form="interval",
    )
    inject: str | None = key(
        None,
        "faults on purpose, for tests: kill:process=1:step=12,cut:process=0:step=20; None: off",
    )

    def check(self) -> list[str]:
        step_s, heartbeat_s = self.step_deadline_s, self.heartbeat_s
        if step_s is None or step_s <= 0.75 * heartbeat_s:
            return []
        return [
            f"step_deadline_s={step_s}: must be at most 0.75 * job.heartbeat_s={heartbeat_s}, when "
            "JAX ends the run without saying why"
        ]


# In the order of the reference; the keys of "" stand at the top of a config.
SECTIONS: dict[str, type[Section]] = {"": Run} | {
    section.__name__.lower(): section
    for section in (
        Model,
        Data,
        Objective,
        Loss,
        Optimizer,
        Schedule,
        Mesh,
        Checkpoint,
        Stop,
        Log,
        Job,
        Study,
    )
}
