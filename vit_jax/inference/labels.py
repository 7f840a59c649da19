"""Classification by words: the classes are texts, compared with images by a text tower."""

from collections.abc import Sequence

from vit_jax.data import words
from vit_jax.models.zero_shot import need_text_side, zero_shot_head, zero_shot_model
from vit_jax.transfer.pretrained import Pretrained


def with_labels(
    pretrained: Pretrained, labels: Sequence[str], prompts: str | Sequence[str] | None = None
) -> Pretrained:
    """`pretrained`, of a model of images and texts, as a classifier whose classes are `labels`.

    Args:
      labels: two or more texts, such as ("a cat", "a dog", "nothing").
      prompts: texts in which {} stands for a label, or the path of a file of such lines; a class is
        the mean of its texts. None: PROMPTS of `data.words`.

    Raises:
      InputError: a label or a prompt is wrong, or the model has no text tower or no tokenizer.
    """
    names = words.check_labels(labels)
    side = need_text_side(pretrained.read_text_side, f"labels: {pretrained.source}")
    tokenizer, classes = side.read_tokenizer(), [[name] for name in names]
    texts = words.encode(tokenizer, classes, words.read_prompts(prompts), "labels")
    model = zero_shot_model(pretrained.model, side.matcher, len(texts))
    head = zero_shot_head(side, texts)
    spec = pretrained.spec._replace(class_names=names, loss=side.matcher.loss)
    return pretrained._replace(model=model, params={**pretrained.params, **head}, spec=spec)
