"""Preprocessing strings: what they parse to, and that every fault is answered well."""

import os
import re
import subprocess
import sys

import pytest
from at_fault import at_fault

from vit_jax.data import OPS, at_full_size, host_tf, parse_ops
from vit_jax.data.ops import check_crops


def test_host_and_device_ops_in_the_words_typed():
    host_ops, device_ops = parse_ops(
        " decode|resize( 72, antialias=True) |central_crop|flip|", (8, 6)
    )
    assert [op.text for op in host_ops] == ["decode", "resize( 72, antialias=True)", "central_crop"]
    assert [op.name for op in device_ops] == ["flip"]
    assert parse_ops("", (8, 8)) == ((), ())
    with at_fault("evals.test.ops") as error:  # one fault of one key
        parse_ops("decde|resize(crop=2)|flop", (8, 8), key="evals.test.ops")
    text = str(error.value)
    assert re.findall(r"decode|crop=2: needs|flip", text) == ["decode", "crop=2: needs", "flip"]
    assert text.count("evals.test.ops") == 1


@pytest.mark.parametrize(
    "string",
    [
        "decode|resize_small(7)|central_crop(pad=True)",
        "resize(9)|random_crop((8, 9), pad=True)|flip",
    ],
)
def test_crops_pad_where_they_say_so(string):
    check_crops(parse_ops(string, (8, 8))[0], "data.ops", (2, 2))


@pytest.mark.parametrize(
    "string",
    ["decode|resize_small(7)|randaugment(2, 10)|central_crop",
     "inception_crop((9, 7))|random_crop", "decode|central_crop|central_crop(9)"],
)  # fmt: skip
def test_crops_larger_than_their_images(string):
    with at_fault("data.ops"):
        check_crops(parse_ops(string, (8, 8))[0], "data.ops")


def test_crops_of_images_whose_size_is_not_known():
    host_ops, _ = parse_ops("decode|central_crop|resize_small(crop=0.5)|random_crop(16)", (8, 8))
    check_crops(host_ops, "data.ops")
    check_crops(host_ops, "data.ops", (8, 9))
    with at_fault("data.ops"):
        check_crops(host_ops, "data.ops", (8, 7))


def test_every_op_is_declared_once():
    """Each argument has a meaning."""
    for name in OPS:
        op = OPS.find(name)
        assert op.__doc__ and all(declared.meaning for declared in op.declared().values())
        assert list(op.signature().parameters) == list(op.declared())


def test_ops_at_full_size():
    scaled, _ = parse_ops("scaled_decode(crop=0.5)|resize(crop=0.5)|random_crop", (8, 8))
    assert at_full_size(scaled) == parse_ops("decode|resize(crop=0.5)|random_crop", (8, 8))[0]
    scaled, _ = parse_ops("scaled_inception_crop(area_min=0.5)", (8, 8))
    (full,) = at_full_size(scaled)
    assert full == parse_ops("inception_crop(None, 0.5)", (8, 8))[0][0] != scaled[0]
    assert full.text == "inception_crop(area_min=0.5)"


def test_tensorflow_is_denied_accelerators_when_it_is_loaded(tmp_path):
    (tmp_path / "tensorflow.py").write_text("""if True:  # TensorFlow itself takes long to load
        import types
        denied = []
        deny = lambda devices, kind: denied.append((devices, kind))
        config = types.SimpleNamespace(set_visible_devices=deny)
    """)
    code = """if True:
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("host_tf", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert "tensorflow" not in sys.modules
        assert module.tf.denied == [([], "GPU"), ([], "TPU")], module.tf.denied
    """
    words = [sys.executable, "-c", code, host_tf.__file__]
    subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
