"""The Vision Transformer with a distillation token.

Axes: B images, N tokens, D width, C classes.
Source: Touvron et al. 2020 (arXiv:2012.12877), section 4.
"""

import flax.linen as nn
import jax

from vit_jax.models.vit import ViT


class DeiT(ViT):
    """ViT with a second token and a second linear head, which learns from a teacher.

    The distillation token stands behind the class token, with a position of its own. In evaluation
    `__call__` gives the mean of the two heads' logits (B, C); in training both, by name:
    {"class": (B, C), "distillation": (B, C)}. `distillation_head` False leaves the second head out:
    the token is attended to, and the class token alone is classified.

    Method "features": the mean of the two tokens (B, D), or without second head the class token.
    Raises: InputError for what has no class token, or a hidden head.
    """

    distillation_head: bool = True

    def setup(self):
        super().setup()
        if self.num_classes is not None and self.distillation_head:
            self.head_distillation = self._make_head(self.num_classes)

    def _make_prefix_tokens(self) -> list[jax.Array]:
        token = self.param("distillation_token", nn.initializers.zeros, (1, 1, self.width))
        return [*super()._make_prefix_tokens(), token]

    def _representations(self, images, train):
        """(class token, distillation token), each (B, D)."""
        x_BND = self.tokens(images, train=train)
        pair = x_BND[:, 0], x_BND[:, 1]
        return tuple(self.pooled_norm(x_BD) for x_BD in pair) if self.norm_pooled else pair

    def features(self, images, *, train=False):
        class_BD, distillation_BD = self._representations(images, train)
        return (class_BD + distillation_BD) / 2 if self.distillation_head else class_BD

    def __call__(self, images, *, train=False):
        if self.num_classes is None:
            return self.features(images, train=train)
        class_BD, distillation_BD = self._representations(images, train)
        if not self.distillation_head:
            return self.head(class_BD)
        logits = {
            "class": self.head(class_BD),
            "distillation": self.head_distillation(distillation_BD),
        }
        return logits if train else (logits["class"] + logits["distillation"]) / 2

    @property
    def num_prefix_tokens(self) -> int:
        """The class token and the distillation token."""
        return 2

    def _find_faults(self) -> list[str]:
        faults = super()._find_faults()
        if self.pool != "token":
            faults.append(f"pool={self.pool!r}: a DeiT needs token")
        if self.hidden_head:
            faults.append("hidden_head=True: the heads of a DeiT are linear; set it to False")
        return faults


DEIT_NAMES = ("DeiT-Ti/16", "DeiT-S/16", "DeiT-B/16")
