"""The model card of an export, in Markdown, made from its receipt."""

from typing import Any

from etils import epath

from vit_jax.transfer.program import GIVES
from vit_jax.transfer.timm_blocks import eps_of_timm

# Fields of a model that the card states.
_SIZES = (
    "stages", "stem_width", "stem_channels", "width_factor", "depth_factor", "width", "depth",
    "num_heads",
)  # fmt: skip
_OF_FILES = {  # {key that a receipt states only if it is unusual: its line in the card}
    "pixel_range": "- Files of more than 8 bits: pixel = 255 (value - {0}) / ({1} - {0}), clipped",
    "exif": "- Files are not turned by their EXIF orientation",
}
_TAKEN = {"bytes": "pixels from 0 to 255, uint8", "floats": "images in this value range, float32"}


def make_card(receipt: dict[str, Any], output: epath.Path) -> str:
    """The model card for people, in Markdown."""
    pixels, back, model = receipt["preprocessing"], receipt["read_back"], receipt["model"]
    sizes = ", ".join(f"{field} {model[field]}" for field in _SIZES if model.get(field))
    at = f", step {receipt['step']:,}, weights {receipt['weights']}" if "step" in receipt else ""
    of_other = ", of the other tower" if receipt.get("takes") == "ids" else ""
    if "text" in receipt:
        text = receipt["text"]
        classes = f"Texts: up to {text['length']} tokens; logits of features of length 1: "
        classes += f"{text['scale']:.6g} x cosine {text['bias']:+.6g}"
    else:
        classes = f"Classes: {model['num_classes']}"
    lines = [
        f"# {output.name}",
        "",
        f"{model['family']}: {sizes}, {receipt['parameters']['count']:,} parameters; "
        f"format {receipt['format']}.",
        "",
        f"- Source: `{receipt['source']}`{at}",
        f"- Images{of_other}: {_say_size(pixels)}, (pixel / 255 - mean) / std with mean "
        f"{pixels['mean']}, "
        f"std {pixels['std']}",
        *(said.format(*(pixels[key] or ())) for key, said in _OF_FILES.items() if key in pixels),
        f"- {classes}; probabilities by {receipt['loss'] or 'softmax'}"
        + ("" if receipt["loss"] else ", because the loss is unknown"),
        f"- Parameters: SHA-256 `{receipt['parameters']['sha256']}`",
        _say_compared(back, receipt.get("gives", "logits")),
    ]
    if "takes" in receipt:
        lines.append(_say_taken(receipt))
    eps, timms = model.get("norm_eps"), eps_of_timm(bool(model.get("pre_norm")))
    has_own = model.get("rotary") or model["family"] == "EfficientNet"
    if receipt["format"] == "timm" and eps != timms and not has_own:
        lines.append(
            f"- timm takes its own LayerNorm epsilon, and this model has {eps}: for equal logits "
            f"pass `norm_layer=partial(nn.LayerNorm, eps={eps})`, without `eps` in model_args"
        )
    if receipt["computed_in"] != "float32" == back["dtype"]:
        lines.append(
            f"- The source computes in {receipt['computed_in']}: its own logits and results differ "
            f"from those in {back['dtype']} by rounding"
        )
    if pixels["library_ops"] not in (None, pixels["ops"]):
        library = {"hf": "transformers"}.get(receipt["format"], receipt["format"])
        lines.append(
            f"- {library} does not support these ops; from these files it does "
            f"`{pixels['library_ops']}`"
        )
    if results := receipt.get("results"):
        lines += ["", "| metric | value | step |", "|---|---|---|"]
        for name, found in results.items():
            value = "not finite" if found["value"] is None else f"{found['value']:.6g}"
            lines.append(f"| {name} | {value} | {found['step']:,} |")
    return "\n".join(lines) + "\n"


def _say_size(pixels: dict[str, Any]) -> str:
    """The size of the images of a receipt's preprocessing, and the ops that make it."""
    if "max_tokens" in pixels:
        size = "{} patches of {} x {}".format(pixels["max_tokens"], *pixels["patch_size"])
        return f"in their own shape, at most {size} pixels by `{pixels['ops']}`"
    if pixels["image_size"] is None:
        return "any size"
    return "{} x {} pixels by `{}`".format(*pixels["image_size"], pixels["ops"])


def _say_taken(receipt: dict[str, Any]) -> str:
    """The card's line on what a program takes and gives."""
    number = 1 if receipt["format"] == "litert" else "b"
    if receipt["takes"] != "ids":
        channels = receipt["model"].get("channels", 3)
        shape = (number, *receipt["preprocessing"]["image_size"], channels)
        axes = f"({', '.join(map(str, shape))}), {'RGB, ' * (channels == 3)}height first"
        return f"- Takes {_TAKEN[receipt['takes']]} {axes}; gives {receipt['gives']}"
    text = receipt["text"]
    said = f"- Takes token ids, int32 ({number}, {text['length']}); gives {receipt['gives']} "
    said += f"({number}, {text['common_width']}), of length 1; "
    if (tokenizer := text.get("tokenizer")) is None:
        return f"{said}the source has no tokenizer files; use the model's own tokenizer"
    side = "left" if tokenizer["pads_left"] else "right"
    cleaned = " open_clip first cleans texts by rules of its own." * tokenizer["cleaned_by_library"]
    return (
        f"{said}padded on the {side} with the id {tokenizer['pad']}; the receipt has an example. "
        "The tokenizer's files lie beside the program; for transformers, copy them into a folder "
        f"as {', '.join(tokenizer['files'])}.{cleaned}"
    )


def _say_compared(back: dict[str, Any], gives: str) -> str:
    """The card's line on the comparison with the exported files."""
    one = GIVES[gives]
    said = f"{gives} in {back['dtype']} differ by at most {back[f'largest_{one}_difference']:.3g}; "
    said += f"the largest is {back[f'largest_{one}']:.3g}"
    if "runtime" not in back:
        return f"- Read back: {said}"
    versions = ", ".join(f"{name} {version}" for name, version in back["runtime"].items())
    if "top1" in back:
        said += f"; top-1 {back['top1']:.2%}, the model's {back['vit_jax_top1']:.2%}"
    of, inputs = ("text", "texts") if "texts" in back else ("image", "pictures")
    same = f", same class {back['same_class']:.1%}" if "same_class" in back else ""
    return (
        f"- Computed by {versions} for {back[f'{of}s']} {inputs}: {said}; smallest cosine "
        f"{back['cosine']:.6f}{same}; {back[f'ms_per_{of}']:.3g} ms for one {of}, and "
        f"{back[f'vit_jax_ms_per_{of}']:.3g} ms by vit_jax on the same machine"
    )
