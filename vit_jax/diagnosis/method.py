"""Whether an objective without labels was seen to learn from as few images as a run has."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.objectives.contract import ObjectivePart

_MANY = 100_000  # images; from so many on, published runs of every objective have learned
_GO_ON = "go on from a trained model: --config=selfsup:ViT-S/16 --config.init_from=SOURCE"
_SEEN = "docs/explanation/does_it_learn.md"


def judge_method(objective: "ObjectivePart", number: int) -> tuple[str, str]:
    """(what was seen of the objective, a remedy where it was not seen to learn).

    Both are "" where that does not matter: labels, texts or a teacher say what to learn, or the
    images are many.

    Args:
      objective: that of a run from random weights.
      number: of its images.
    """
    name, seen = objective.name, objective.fewest_images
    if seen == 0 or (seen is None and number >= _MANY):
        return "", ""
    found = f"{name}, {number:,} images: "
    if seen is None:
        return (
            f"{found}it was not seen to learn features better than the pixels from 5,000 images in "
            f"twenty CPU minutes; {_SEEN} has the table",
            f"take --config=selfsup:folder, which was; or {_GO_ON}",
        )
    learned = f"{seen:,} images were enough to learn features better than the pixels; {_SEEN}"
    return found + learned, _GO_ON if number < seen else ""
