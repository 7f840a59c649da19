"""The Vision Transformer with a distillation token.

Axes: B images, N tokens, D width, C classes.
Source: Touvron et al. 2020 (arXiv:2012.12877), section 4.
"""

from typing import Any

import flax.linen as nn
import jax

from vit_jax.base.pictures import Images
from vit_jax.config import key
from vit_jax.models.vit import ViT


class DeiT(ViT):
    """ViT with a distillation token and a second linear head, which learns from a teacher.

    The distillation token follows the class token and has its own position. In evaluation
    `__call__` returns the mean of the two heads' logits (B, C); in training it returns both by
    name: {"class": (B, C), "distillation": (B, C)}. With `distillation_head` False there is no
    second head: the blocks still attend to the token, and the head classifies the class token.

    Method "features": the mean of the two tokens (B, D); without the second head the class token.
    Raises: InputError if `pool` is not "token", or `hidden_head` is set.
    """

    distillation_head: bool = key(True, "the second head")

    names = ("DeiT-Ti/16", "DeiT-S/16", "DeiT-B/16")

    def setup(self) -> None:
        super().setup()
        if self.num_classes is not None and self.distillation_head:
            self.head_distillation = self._make_head(self.num_classes)

    @nn.nowrap
    def _make_prefix_tokens(self) -> list[jax.Array]:
        token = self.param("distillation_token", nn.initializers.zeros, (1, 1, self.width))
        class_token, *registers = super()._make_prefix_tokens()
        return [class_token, token, *registers]

    def _representations(self, x_BND: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(class token, distillation token), each (B, D)."""
        pair = x_BND[:, 0], x_BND[:, 1]
        return tuple(self.pooled_norm(x_BD) for x_BD in pair) if self.norm_pooled else pair

    def represent(self, x_BND: jax.Array, counts_B: jax.Array | None = None) -> jax.Array:
        del counts_B  # the tokens come before the patches
        class_BD, distillation_BD = self._representations(x_BND)
        return (class_BD + distillation_BD) / 2 if self.distillation_head else class_BD

    def __call__(
        self, images: Images, *, train: bool = False, mask: jax.Array | None = None
    ) -> Any:
        del mask
        if self.num_classes is None:
            return self.features(images, train=train)
        class_BD, distillation_BD = self._representations(self.tokens(images, train=train))
        if not self.distillation_head:
            return self.head(class_BD)
        logits = {
            "class": self.head(class_BD),
            "distillation": self.head_distillation(distillation_BD),
        }
        return logits if train else (logits["class"] + logits["distillation"]) / 2

    @property
    def num_named_tokens(self) -> int:
        """The class token and the distillation token."""
        return 2

    @property
    def num_pooled_tokens(self) -> int:
        return 2 if self.distillation_head else 1

    @nn.nowrap
    def find_faults(self) -> list[str]:
        faults = super().find_faults()
        if self.pool != "token":
            faults.append(f"pool={self.pool!r}: a DeiT needs token")
        if self.hidden_head:
            faults.append("hidden_head=True: the heads of a DeiT are linear; set it to False")
        if self.head_batch_norm:
            faults.append("head_batch_norm=True: a DeiT has two heads; set it to False")
        return faults
