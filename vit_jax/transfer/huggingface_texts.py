"""Text towers with the names of Hugging Face's `transformers`: of a CLIPModel or a SiglipModel.

A SigLIP 2 of a fixed size is a SiglipModel; those for any size (NaFlex) are not read.
"""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from vit_jax.base.errors import Faults, collect_faults
from vit_jax.data.tokenizers import TokenizerFiles, for_transformers
from vit_jax.models.text import Matcher, TextTower
from vit_jax.models.zero_shot import TextSide
from vit_jax.transfer.huggingface_kinds import GELU, HIDDEN_ACT, KINDS, block_rows
from vit_jax.transfer.names import HEADS_BY_WIDTH, LINEAR, NORM, Row, read_rows, row, rows_of
from vit_jax.transfer.source import Source

PAIRS = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}  # kind: its model_type
# The arrays of the text side.
TEXTS = r"(text_model|text_projection|visual_projection|logit_\w+)(\..*)?"
_TOKENS = "text_model.embeddings.token_embedding.weight"
_POSITIONS = "text_model.embeddings.position_embedding.weight"
_UP = "text_model.encoder.layers.0.mlp.fc1.weight"
_SIZES = {"vocabulary": "vocab_size", "length": "max_position_embeddings", "width": "hidden_size",
          "depth": "num_hidden_layers", "mlp_dim": "intermediate_size"}  # fmt: skip
_STATED = {"num_attention_heads": "a positive int", "hidden_act": "text",
           "layer_norm_eps": "a positive number", "eos_token_id": "an int from 0"}  # fmt: skip
_DEFAULT_HEADS = {"clip_vision_model": 8, "siglip_vision_model": 12}
_LARGEST = 2  # transformers takes this id, which older files state, for the largest of a text


def take_texts(source: Source, name: str, **tokenizer: Any) -> Callable[[], TextSide] | None:
    """A function that reads the text side of `source`, whose image tower is of the kind `name`.

    Its arrays are taken out of `source`. None: there is no text tower that can be read.
    `tokenizer`: as for `read_texts`.
    """
    if name not in PAIRS or _TOKENS not in source.arrays:
        return None
    rest = copy.copy(source)
    rest.arrays = {n: array for n, array in source.arrays.items() if re.fullmatch(TEXTS, n)}
    source.arrays = {n: array for n, array in source.arrays.items() if n not in rest.arrays}
    return partial(read_texts, rest, name, **tokenizer)


def tokenizer_files(side: TextSide) -> dict[str, bytes]:
    """{name: content} of its tokenizer, by which transformers pads as the text tower needs."""
    files, text = {file.name: file.read_bytes() for file in side.files}, side.matcher.text
    return for_transformers(files, text.length, masks_padding=text.causal) if files else {}


def read_texts(source: Source, name: str, **tokenizer: Any) -> TextSide:
    """The text side in the arrays of `source`; `tokenizer`: fields of its `TokenizerFiles`.

    Raises:
      InputError: naming arrays that do not fit, or contradictions with config.json.
    """
    arrays, kind = source.arrays, KINDS[name]
    stated = source.read_stated((source.config or {}).get("text_config"), _STATED)
    causal = name == "clip_vision_model"
    projection = "text_projection.weight" if causal else "text_model.head.weight"
    source.require(dict.fromkeys((_TOKENS, _POSITIONS, _UP, projection), 2))
    (vocabulary, width), length = arrays[_TOKENS].shape, len(arrays[_POSITIONS])
    depth = source.count_layers(r"text_model\.encoder\.layers\.(\d+)\.")
    sizes = dict(zip(_SIZES, (vocabulary, length, width, depth, len(arrays[_UP])), strict=True))
    source.check_agreement(stated, {_SIZES[field]: size for field, size in sizes.items()})
    usual = kind.heads.get(width, HEADS_BY_WIDTH.get(width))
    default = usual if source.config is None else _DEFAULT_HEADS[name]
    heads: Any = stated.get("num_attention_heads", default)  # None is refused below
    act = stated.get("hidden_act", kind.act)
    faults, end_id = Faults(), stated.get("eos_token_id", _LARGEST)
    faults.need(heads and width % heads == 0, f"num_attention_heads={heads}: needs a divisor of "
                f"{width}, stated in the text_config of config.json")  # fmt: skip
    faults.need_known("hidden_act", act, GELU)
    source.refuse(faults, "its text tower cannot be inferred")
    text = TextTower(
        **sizes,
        num_heads=heads,
        common_width=len(arrays[projection]),
        causal=causal,
        end_id=None if end_id == _LARGEST else end_id,
        gelu=GELU[act],
        norm_eps=float(stated.get("layer_norm_eps", kind.eps)),
    )
    matcher = Matcher(text, source.size("visual_projection.weight", 1), "logit_bias" in arrays)
    params = read_rows(text_rows(matcher), source, matcher)
    folder = source.path if source.path.is_dir() else source.path.parent
    files = TokenizerFiles(folder, length, **tokenizer)
    return TextSide(matcher, params, files.read, files.paths, by_files=not tokenizer)


def text_rows(matcher: Matcher) -> list[Row]:
    """The rows of the text side: text tower, heads, scale and bias."""
    tower = [
        row("embeddings.token_embedding.weight", "token_embedding/embedding"),
        row("embeddings.position_embedding.weight", "pos_embedding"),
        *block_rows(
            "encoder.layers.{i}", "layer_norm1 layer_norm2", "self_attn.{1}_proj",
            "self_attn.out_proj",
        ),
        *NORM("final_layer_norm", "encoder/norm"),
    ]  # fmt: skip
    if not matcher.text.causal:
        tower += LINEAR("head", "head")
    rows = [row._replace(theirs=f"text_model.{row.theirs}") for row in tower]
    rows += LINEAR("text_projection", "head") if matcher.text.causal else []
    rows = [row._replace(ours=tuple(f"text/{name}" for name in row.ours)) for row in rows]
    scalar = "" if matcher.text.causal else " -> 1"  # SigLIP's have one axis
    rows += [
        *LINEAR("visual_projection", "image_head"),
        row("logit_scale", "logit_scale", scalar),
        row("logit_bias", "logit_bias", scalar),
    ]
    return rows_of(rows, matcher, [{"i": i} for i in range(matcher.text.depth)])


def check_texts(matcher: Matcher, name: str) -> None:
    """Raise InputError if a pair whose image tower is of the kind `name` cannot hold `matcher`."""
    clip, faults = name == "clip_vision_model", Faults()
    pair, projects = "a CLIPModel" if clip else "a SiglipModel", matcher.image_width is not None
    faults.need(
        matcher.text.causal == clip,
        f"objective.causal={not clip}: the text tower of {pair} needs {clip}",
    )
    faults.need(
        projects == clip,
        "objective.common_width: {} {} projection of images; set it to {}".format(
            pair, *(("needs a", "a number") if clip else ("has no", "None"))
        ),
    )
    loss = "softmax" if clip else "sigmoid"
    faults.need(matcher.loss == loss, f"objective.loss={matcher.loss!r}: {pair} needs {loss!r}")
    faults.need(
        not clip or matcher.text.end_id != _LARGEST,
        f"data.tokenizer: ends texts with the id {_LARGEST}, for which {pair} takes the largest id "
        "of a text; train with a tokenizer that ends them with another",
    )
    collect_faults(faults, "--format=hf_pair cannot hold this model")


def write_text_config(matcher: Matcher, name: str) -> dict[str, Any]:
    """The text_config of a model whose image tower is of the kind `name`."""
    text = matcher.text
    config = {
        "model_type": f"{PAIRS[name]}_text_model",
        "num_attention_heads": text.num_heads,
        "hidden_act": HIDDEN_ACT[text.gelu],
        "layer_norm_eps": text.norm_eps,
        "projection_dim" if text.causal else "projection_size": text.common_width,
        **{theirs: getattr(text, ours) for ours, theirs in _SIZES.items()},
    }
    end_id = {"eos_token_id": _LARGEST if text.end_id is None else text.end_id}
    return config | end_id if text.causal else config
