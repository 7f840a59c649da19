"""Classification by words: the classes are texts, compared with images by a text tower."""

from collections.abc import Sequence

from vit_jax.base.errors import Faults, collect_faults
from vit_jax.data import words
from vit_jax.models.zero_shot import need_text_side, zero_shot_head, zero_shot_model
from vit_jax.transfer.pretrained import Pretrained


def with_labels(
    pretrained: Pretrained, labels: tuple[str, ...], prompts: Sequence[str] = words.PROMPTS
) -> Pretrained:
    """`pretrained`, of a model of images and texts, as a classifier whose classes are `labels`.

    A class is the mean of its texts.

    Args:
      labels: from `words.check_labels`.
      prompts: from `words.read_prompts`.

    Raises:
      InputError: a text is wrong, two labels are one to the tokenizer, or the model has no text
        tower or no tokenizer.
    """
    side = need_text_side(pretrained.read_text_side, f"labels: {pretrained.source}")
    tokenizer, classes = side.read_tokenizer(), [[label] for label in labels]
    texts = words.encode(tokenizer, classes, prompts, "labels")
    first, faults = dict[bytes, str](), Faults()
    for label, ids in zip(labels, texts, strict=True):
        same = first.setdefault(ids.tobytes(), label)
        alike = f"labels: {same!r} and {label!r} are one text to the model's tokenizer"
        faults.need(same is label, f"{alike}; leave one out")
    collect_faults(faults)
    model = zero_shot_model(pretrained.model, side.matcher, len(texts))
    head = zero_shot_head(side, texts)
    spec = pretrained.spec._replace(class_names=labels, loss=side.matcher.loss)
    return pretrained._replace(model=model, params={**pretrained.params, **head}, spec=spec)
