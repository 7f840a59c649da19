"""The section `study`, which a run does not read: several runs that the command `study` starts."""

from vit_jax.config.parts import FROM_0, POSITIVE, Section, key


class Study(Section):
    """Several runs, started by the command `study`, and pseudo labels; not of `train`."""

    name: str | None = key(None, "a study")
    seeds: int = key(3, "number of runs of each setting, from `seed` on", within=POSITIVE)
    metric: str = key("held_out/top1", "evaluator/metric of the report; higher is better")
    point: str = key("last", "step that counts; best: of keep_best", choices=("last", "best"))
    unlabelled: str | None = key(None, 'images that get pseudo labels: "NAME" or "NAME@SPLIT"')
    unlabelled_dir: str | None = key(None, "their data_dir; None: data.data_dir")
    ratio: float = key(1.0, "images with pseudo labels for each labelled one", within=FROM_0)
    soft_labels: bool = key(True, "pseudo labels are probabilities; False: the most likely class")
    confidence: float = key(0.3, "smallest probability of a pseudo label", within="[0, 1)")
    per_class: int | None = key(
        None,
        "images of each class: the most confident ones, repeated if there are fewer; None: all",
        within=POSITIVE,
    )
