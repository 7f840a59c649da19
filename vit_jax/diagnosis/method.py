"""Whether an objective without labels was seen to learn from as few images as a run has."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.objectives.contract import ObjectivePart

_MANY = 1_000_000  # images: ImageNet-1k has more, and each objective's paper learns from it
_GO_ON = "go on from a trained model: --config=selfsup:ViT-S/16 --config.init_from=SOURCE"
_SEEN = "docs/explanation/does_it_learn.md"


def judge_method(
    objective: "ObjectivePart", number: int, source: str | None = None
) -> tuple[str, str]:
    """(what was seen of the objective, a remedy where it was not seen to learn).

    Both are "" where that does not matter: labels, texts or a teacher say what to learn, the run
    goes on from a `source` of weights, or its images, whose `number` is given, are many.
    """
    name, seen = objective.name, objective.fewest_images
    if source is not None or seen == 0 or (seen is None and number >= _MANY):
        return "", ""
    found = f"{name}, {number:,} images: "
    if seen is None:
        return (
            f"{found}no run shows that it learns features better than the pixels from 5,000 images "
            f"in twenty CPU minutes; {_SEEN}",
            f"take --config=selfsup:folder, which does; or, on an accelerator, {_GO_ON}",
        )
    learned = f"its small recipe learned features better than the pixels from {seen:,}; {_SEEN}"
    return found + learned, f"on an accelerator, {_GO_ON}" if number < seen else ""
