"""What parameters show without an image: filters of the first layer, similar positions."""

import numpy as np

from vit_jax import tree
from vit_jax.models.contract import CONSTANTS, about
from vit_jax.transfer.pretrained import Pretrained

MAX_COMPONENTS = 28


def filters_of(pretrained: Pretrained) -> np.ndarray | str:
    """The filters that see the pixels, float32 (filters, height, width, channels), as applied.

    Those of a ViT are the columns of its patch embedding, those of hybrids, BiTs and EfficientNets
    the kernels of the root convolution. A text says why a model has none.
    """
    found = about(pretrained.model).filters(pretrained.params)
    return found if isinstance(found, str) else np.moveaxis(np.asarray(found, np.float32), -1, 0)


def positions_of(pretrained: Pretrained) -> dict[str, np.ndarray] | str:
    """The position embeddings of the patches, {"stem" or "layer N": float32 (S, D)}.

    A text says why the model has none.
    """
    model, image_size = pretrained.model, pretrained.spec.image_size
    if why := about(model).why_no_positions:
        return why
    if image_size is None:
        return "the model takes images of any size; choose one with --image_size"
    leaves = pretrained.params | {
        name.removeprefix(f"{CONSTANTS}/"): leaf
        for name, leaf in pretrained.model_state.items()
        if name.startswith(f"{CONSTANTS}/")
    }
    positions = model.positions(image_size)
    of_layer = [f"encoder/layer_{i}/" for i in range(model.depth)]
    places = {f"layer {i}": place for i, place in enumerate(of_layer)}
    if model.positions_at != "layers":
        places = {"stem": ""}
    found = {}
    for name, place in places.items():
        tables = {
            leaf.removeprefix(place): value
            for leaf, value in leaves.items()
            if leaf.startswith(f"{place}pos_embedding")
        }
        given = tree.unflatten_names(tables).get("pos_embedding")
        table_ND = np.asarray(positions.build(given))[0]
        found[name] = table_ND[model.num_prefix_tokens :]
    return found


def cosine_similarity(x_SD: np.ndarray) -> np.ndarray:
    """The cosine of the angle between each two rows, (S, S); 0 for a row of zeros.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 4.5 and figure 7, centre.
    """
    x_SD = np.asarray(x_SD, np.float64)
    lengths_S1 = np.linalg.norm(x_SD, axis=1, keepdims=True)
    x_SD = x_SD / np.where(lengths_S1 > 0, lengths_S1, 1)
    return (x_SD @ x_SD.T).astype(np.float32)
