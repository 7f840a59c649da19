"""Files that are broken, each in its way: refused with the fault named, and nothing written."""

import io
import json
import pathlib
import re
import shutil
import struct
import zipfile

import numpy as np
import pytest
from at_fault import golden_page
from safetensors.numpy import load_file, save_file

from vit_jax.base.errors import InputError
from vit_jax.transfer import load_pretrained

EMBEDDING = "embedding/kernel"
QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
POSITIONS = "Transformer/posembed_input/pos_embedding"


def npz(change):
    """A break of the golden .npz: change(arrays) in place."""

    def spoil(golden, tmp_path):
        with np.load(golden / "vit_finetuned.npz") as file:
            arrays = dict(file)
        change(arrays)
        np.savez(tmp_path / "broken.npz", **arrays)
        return tmp_path / "broken.npz"

    return spoil


def raw(name, change):
    """A break of a golden file: change(bytes) -> bytes."""

    def spoil(golden, tmp_path):
        path = tmp_path / ("broken" + (golden / name).suffix)
        path.write_bytes(change((golden / name).read_bytes()))
        return path

    return spoil


def tensors(name, change):
    """A break of a golden folder or file of tensors: change(arrays) in place."""

    def spoil(golden, tmp_path):
        path = copy(golden / name, tmp_path)
        file = path / "model.safetensors" if path.is_dir() else path
        arrays = load_file(file)
        change(arrays)
        save_file(arrays, file)
        return path

    return spoil


def config(name, change):
    """A break of the JSON that belongs to a golden: change(its content) in place."""

    def spoil(golden, tmp_path):
        path = copy(golden / name, tmp_path)
        file = path / "config.json" if path.is_dir() else path.with_suffix(".json")
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return path

    return spoil


def folder(change):
    """A break of a golden folder: change(its copy)."""

    def spoil(golden, tmp_path):
        path = copy(golden / "hf_vit", tmp_path)
        change(path)
        return path

    return spoil


def in_shards(weight_map):
    """A folder with an index, which is read where there is no whole file."""

    def write(path):
        (path / "model.safetensors").rename(path / "model-1.safetensors")
        text = json.dumps({"weight_map": weight_map})
        (path / "model.safetensors.index.json").write_text(text)

    return folder(write)


def copy(source, tmp_path):
    target = tmp_path / f"broken{source.suffix}"
    if source.is_dir():
        return shutil.copytree(source, target)
    shutil.copy(source.with_suffix(".json"), target.with_suffix(".json"))
    shutil.copy(source, target)
    return target


def put(key, value):
    return lambda content: content.__setitem__(key, value)


def drop(key):
    return lambda content: content.__delitem__(key)


def drop_all(prefix):
    def change(arrays):
        for name in [name for name in arrays if name.startswith(prefix)]:
            del arrays[name]

    return change


def edit(key, change):
    return lambda arrays: arrays.__setitem__(key, change(arrays[key]))


def poisoned(value):
    def change(array):
        array = array.copy()
        array.flat[3] = value
        return array

    return change


def with_header(change):
    """Tensors whose header is changed, as text, its length with it."""

    def rewrite(data):
        (size,) = struct.unpack("<Q", data[:8])
        header = change(data[8 : 8 + size])
        return struct.pack("<Q", len(header)) + header + data[8 + size :]

    return rewrite


def claim(shape):
    """The header of an array file, and hardly a value."""
    file = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(8)


def zipped(name, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def encrypted(data):
    """The bit of an archive's first member, in both of its headers, that says so."""
    data = bytearray(data)
    data[data.index(b"PK\3\4") + 6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    return bytes(data)


def args(**changes):
    return lambda content: content["model_args"].update(changes)


HF, TIMM, TENSORS = "hf_vit", "timm_vit.safetensors", "hf_vit/model.safetensors"
HF_POSITIONS = "vit.embeddings.position_embeddings"
HF_UP = "vit.encoder.layer.0.intermediate.dense.weight"

BROKEN = {
    # .npz
    "npz: empty": (raw("vit_finetuned.npz", lambda b: b""), "not a readable .npz"),
    "npz: end cut off": (raw("vit_finetuned.npz", lambda b: b[:-9]), "not a readable .npz"),
    "npz: no zip": (raw("vit_finetuned.npz", lambda b: b"x" * 999), "not a readable .npz"),
    "npz: a flipped byte": (
        raw("vit_finetuned.npz", lambda b: b[:900] + bytes([b[900] ^ 1]) + b[901:]), "CRC",
    ),
    "npz: a pickled object": (npz(put("extra", np.array([{}], object))), "not a readable .npz"),
    "npz: an array that claims to be huge": (
        raw("vit_finetuned.npz", lambda b: zipped("cls.npy", claim((2**46,)))), "not a readable",
    ),
    "npz: a head without axes": (
        npz(put("head/kernel", np.float32(1))), "head/kernel: (), but needs 2 axes",
    ),
    "npz: a header that is no Python": (
        raw("vit_finetuned.npz", lambda b: zipped("cls.npy", claim((1,)).replace(b"{", b"["))),
        "not a readable .npz",
    ),
    "npz: a member that is no array": (
        raw("vit_finetuned.npz", lambda b: zipped("notes.txt", b"mine")), "notes.txt has dtype",
    ),
    "npz: encrypted": (
        raw("vit_finetuned.npz", lambda b: encrypted(zipped("cls.npy", claim((1,))))),
        "not a readable .npz",
    ),
    "npz: an array of text": (npz(put("cls", np.array(["a"]))), "cls has dtype <U1"),
    "npz: whole numbers": (npz(edit("cls", lambda a: a.astype(np.int64))), "dtype int64"),
    "npz: NaN": (npz(edit(QUERY, poisoned(np.nan))), f"{QUERY}: some of its values"),
    "npz: no embedding": (npz(drop(EMBEDDING)), f"{EMBEDDING}: absent"),
    "npz: an array is missing": (npz(drop("head/bias")), "head/bias: absent"),
    "npz: an array too many": (npz(put("extra/kernel", np.ones(2))), "extra/kernel (2,): unknown"),
    "npz: a scalar for a matrix": (npz(put(QUERY, np.float32(1))), "(), but needs 3 axes"),
    "npz: transposed": (
        npz(edit("head/kernel", lambda a: a.T)), "head/bias: (10,), but needs (32,)",
    ),
    "npz: a position too many": (
        npz(edit(POSITIONS, lambda a: np.pad(a, ((0, 0), (0, 1), (0, 0))))), "form a square grid",
    ),
    "npz: an empty array": (npz(edit(EMBEDDING, lambda a: a[:0])), "(0, 8, 3, 32)"),
    "npz: of grey images": (npz(edit(EMBEDDING, lambda a: a[:, :, :1])), "(8, 8, 1, 32)"),
    # .safetensors
    "tensors: empty": (raw(TENSORS, lambda b: b""), "not a readable .safetensors"),
    "tensors: truncated": (raw(TENSORS, lambda b: b[:-100]), "not a readable .safetensors"),
    "tensors: huge header": (
        raw(TENSORS, lambda b: struct.pack("<Q", 2**62) + b[8:]), "header too large",
    ),
    "tensors: header is no JSON": (
        raw(TENSORS, with_header(lambda h: b"x" * len(h))), "not a readable .safetensors",
    ),
    "tensors: arrays that overlap": (
        raw(TENSORS, with_header(lambda h: h.replace(b"[40,1320]", b"[36,1316]"))),
        "not a readable .safetensors",
    ),
    "tensors: an unknown dtype": (
        raw(TENSORS, with_header(lambda h: h.replace(b'"F32"', b'"F99"', 1))),
        "not a readable .safetensors",
    ),
    "tensors: no arrays": (raw(TENSORS, lambda b: struct.pack("<Q", 2) + b"{}"), "no arrays"),
    "tensors: whole numbers": (
        tensors(HF, edit(HF_UP, lambda a: a.astype(np.int32))), f"{HF_UP} has dtype I32",
    ),
    "tensors: of another library": (
        tensors(TIMM, lambda arrays: [arrays.pop(name) for name in list(arrays)[1:]]),
        "the names of no known format",
    ),
    "tensors: of another family, with counters": (
        tensors(TIMM, lambda arrays: [
            arrays.clear(),
            arrays.update({"bn1.num_batches_tracked": np.array(3), "conv_stem.weight": np.ones(2)}),
        ]),
        "the names of no known format: conv_stem.weight",
    ),
    "hf: infinite": (tensors(HF, edit(HF_UP, poisoned(np.inf))), f"{HF_UP}: some of its values"),
    "hf: an array too many": (
        tensors(HF, put("vit.embeddings.other_token", np.ones((1, 1, 32), np.float32))),
        "vit.embeddings.other_token (1, 1, 32): unknown",
    ),
    "hf: of grey images": (
        tensors(HF, edit("vit.embeddings.patch_embeddings.projection.weight",
                         lambda a: np.ascontiguousarray(a[:, :1]))),
        "num_channels=3, but 1 in the arrays",
    ),
    "hf: positions of another size": (
        tensors(HF, edit(HF_POSITIONS, lambda a: np.ascontiguousarray(a[:, :10]))),
        f"{HF_POSITIONS}: (1, 10, 32), but needs (1, 17, 32)",
    ),
    "hf: config of another width": (config(HF, put("hidden_size", 64)), "hidden_size=64, but 32"),
    "hf: heads that do not divide": (config(HF, put("num_attention_heads", 5)), "num_heads=5"),
    "hf: another activation": (config(HF, put("hidden_act", "relu")), "hidden_act='relu'"),
    "hf: an epsilon of 0": (config(HF, put("layer_norm_eps", 0)), "layer_norm_eps=0:"),
    "hf: an epsilon in words": (config(HF, put("layer_norm_eps", "small")), "layer_norm_eps"),
    "hf: an image size in words": (config(HF, put("image_size", "32")), "image_size='32'"),
    "hf: too few class names": (config(HF, put("id2label", {"0": "a"})), "1 class names for 10"),
    "hf: config is no JSON": (
        folder(lambda path: (path / "config.json").write_text("{")), "not readable as JSON",
    ),
    "hf: config is a list": (
        folder(lambda path: (path / "config.json").write_text("[]")), "needs a JSON object",
    ),
    "hf: half a folder": (
        folder(lambda path: (path / "model.safetensors").unlink()), "not a source of a known",
    ),
    "hf: an index whose shard is missing": (
        in_shards({"a": "model-1.safetensors", "b": "model-2.safetensors"}),
        "model-2.safetensors",
    ),
    "hf: an index with a number for a file": (
        in_shards({"a": 3, "b": [4]}), "broken/3'",
    ),
    "hf: an index that leads elsewhere": (
        in_shards({"a": "../secret.safetensors"}),
        "'../secret.safetensors', which is outside",
    ),
    "hf: pixels in words": (
        folder(lambda path: (path / "preprocessor_config.json").write_text(
            '{"image_mean": "half"}')),
        "image_mean='half': needs numbers of channels",
    ),
    "hf: a head without axes": (
        tensors(HF, put("classifier.weight", np.array(1, np.float32))),
        "classifier.weight: (), but needs 2 axes",
    ),
    # timm
    "timm: positions without axes": (
        tensors(TIMM, put("pos_embed", np.ones(3, np.float32))), "pos_embed: (3,), but needs 3",
    ),
    "timm: a layer is missing": (
        tensors(TIMM, drop_all("blocks.0.")),
        "blocks.0.mlp.fc2.weight: absent",
    ),
    "timm: qkv of other heads": (
        tensors(TIMM, edit("blocks.0.attn.qkv.weight", lambda a: np.ascontiguousarray(a[:-2]))),
        "blocks.0.attn.qkv.weight: (94, 32), but needs (96, 32)",
    ),
    "timm: register tokens": (
        config(TIMM, args(reg_tokens=4)), "reg_tokens=4, but 0 in the arrays",
    ),
    "timm: another pooling": (config(TIMM, args(global_pool="max")), "global_pool='max'"),
    "timm: another activation": (config(TIMM, args(act_layer="relu")), "act_layer='relu'"),
    "timm: no class token": (config(TIMM, args(class_token=False)), "class_token=False, but True"),
    "timm: pooled otherwise": (config(TIMM, args(global_pool="avg")), "fc_norm=True, but False"),
    "timm: another MLP": (config(TIMM, args(mlp_ratio=4)), "mlp_dim=128, but 64"),
    "timm: another patch": (config(TIMM, args(patch_size=16)), "patch_size=(16, 16), but (8, 8)"),
    "timm: more patches": (
        config(TIMM, args(img_size=47)), "pos_embed: (1, 17, 32), but needs (1, 26, 32)",
    ),
    "timm: heads in words": (config(TIMM, args(num_heads="four")), "num_heads"),
    "timm: other classes": (config(TIMM, put("num_classes", 9)), "num_classes=9, but 10"),
    "timm: arguments in a list": (config(TIMM, put("model_args", [])), "model_args=[]: needs an"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused(golden, tmp_path, kind):
    spoil, says = BROKEN[kind]
    path = spoil(golden, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as error:
        load_pretrained(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


UNSUPPORTED = golden_page(pathlib.Path(__file__).with_name("unsupported.txt"))


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_weights_that_are_not_supported_are_named_for_what_they_are(case, tmp_path):
    """By the names of arrays and by what config.json states."""
    *names, stated = re.fullmatch(r"(.*) (\{.*\})", case).groups()
    arrays = dict.fromkeys(names[0].split(), np.ones(1, np.float32))
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(stated)
    says = rf"these weights are {UNSUPPORTED[case]}.*not supported; supported:"
    with pytest.raises(InputError, match=says):
        load_pretrained(tmp_path)
