"""Preprocessing strings: what they parse to, and that every fault is answered well."""

import os
import subprocess
import sys

import pytest

from vit_jax.data import host_tf, parse_ops
from vit_jax.data.ops import check_crops, do_the_same
from vit_jax.errors import InputError


def test_host_and_device_ops_in_the_words_typed():
    host_ops, device_ops = parse_ops(
        " decode|resize( 72, antialias=True) |central_crop|flip|", (8, 6)
    )
    assert [op.text for op in host_ops] == ["decode", "resize( 72, antialias=True)", "central_crop"]
    assert [op.name for op in device_ops] == ["flip"]
    assert parse_ops("", (8, 8)) == ((), ())


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
    ("string", "words"),
    [
        (
            "decode|resize_small(7)|randaugment(2, 10)|central_crop",
            ["'central_crop' takes 8 x 8 pixels", "'resize_small(7)' gives images of 7 x 7",
             "resize_small(crop=0.875) follows data.image_size", "central_crop(pad=True)"],
        ),
        ("inception_crop((9, 7))|random_crop", ["8 x 8", "gives images of 9 x 7"]),
        ("decode|central_crop|central_crop(9)", ["'central_crop' gives images of 8 x 8"]),
    ],
)  # fmt: skip
def test_crops_larger_than_their_images(string, words):
    with pytest.raises(InputError) as error:
        check_crops(parse_ops(string, (8, 8))[0], "data.ops")
    assert all(word in str(error.value) for word in ["data.ops: ", *words])


def test_crops_of_images_whose_size_is_not_known():
    host_ops, _ = parse_ops("decode|central_crop|resize_small(crop=0.5)|random_crop(16)", (8, 8))
    check_crops(host_ops, "data.ops")
    check_crops(host_ops, "data.ops", (8, 9))
    with pytest.raises(InputError, match="the data give images of 8 x 7"):
        check_crops(host_ops, "data.ops", (8, 7))


@pytest.mark.parametrize(
    ("string", "words"),
    [
        ("decode|flipp", ["'flipp'", "did you mean 'flip'?", "inception_crop"]),
        ("decode|zoom", ["'zoom'", "Known: decode"]),
        ("decode|resize(8", ["'resize(8' is not an op"]),
        ("decode|resize(size)", ["'resize(size)'", "literal arguments"]),
        ("decode|__import__('os').abort()", ["is not an op"]),
        ("decode|pad_crop", ["missing a required argument: 'padding'", "usage: pad_crop(padding)"]),
        ("decode|resize(8, 9, 10)", ["too many positional arguments", "usage: resize(size=None"]),
        ("decode|resize(side=8)", ["unexpected keyword argument 'side'"]),
        ("decode|resize(0)", ["'resize(0)'", "size=0", "positive int or a pair"]),
        ("decode|resize((8, 8, 3))", ["size=(8, 8, 3)", "positive int or a pair"]),
        ("decode|resize(True)", ["size=True", "positive int or a pair"]),
        ("decode|resize(antialias='no')", ["antialias must be True or False", "'no'"]),
        ("|".join(3000 * ["flip"]), ["has 3,000 ops", "at most 100"]),
        (f"decode|pad_crop({10**20})", ["padding must be an integer from 1 to 65535"]),
        (f"decode|resize({10**20})", ["positive int or a pair of them, up to 65535"]),
        ("decode|resize_small(crop=5e-324)", ["crop must be a number from 0.01 to 1"]),
        ("decode|pad_crop(-1)", ["padding must be an integer from 1 to 65535, not -1"]),
        ("inception_crop(area_min=5)", ["0 < area_min <= area_max <= 1"]),
        ("inception_crop(area_min='x')", ["0 < area_min", "not 'x', 1.0"]),
        ("decode|flip|resize", ["'resize' runs on the host", "'decode|resize|flip'"]),
        ("resize|decode", ["'decode' comes after 'resize'", "put it first"]),
        ("decode|resize(crop=1.5)", ["crop must be", "from 0.01 to 1, not 1.5"]),
        ("decode|resize_small(crop=True)", ["crop must be", "from 0.01 to 1", "not True"]),
        ("decode|central_crop(pad=1)", ["pad must be True or False, not 1"]),
        (
            "scaled_decode|randaugment(2, 10)|random_crop(pad=True)|resize",
            [
                "'scaled_decode' decodes",
                "at most 8 x 8",
                "'random_crop(pad=True)' follows",
                "'decode'",
            ],
        ),
        ("scaled_decode(9)|resize_small((8, 10))", ["at most 9 x 9", "'resize_small((8, 10))'"]),
    ],
)
def test_faults_name_the_op_and_the_remedy(string, words):
    with pytest.raises(InputError) as error:
        parse_ops(string, (8, 8))
    assert str(error.value).startswith("data.ops")
    for word in words:
        assert word in str(error.value)


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


@pytest.mark.parametrize(
    ("a", "b", "size", "same"),
    [
        (
            "resize(160)|random_crop|pad_crop(1)",
            "resize(crop=0.8) | random_crop(pad=False)|pad_crop(1)",
            128,
            True,
        ),
        ("resize_small(256)|central_crop", "resize_small(crop=0.875)|central_crop", 224, True),
        ("resize_small(256)|central_crop", "resize_small(crop=0.875)|central_crop", 384, False),
        ("resize_small(8)", "resize(8)", 8, False),
        ("central_crop", "central_crop(pad=True)", 8, False),
        ("resize|pad_crop(1)", "pad_crop(1)|resize", 8, False),
        ("torchvision_resize(8)", "torchvision_resize((8, 8))", 8, False),
    ],
)
def test_ops_that_do_the_same(a, b, size, same):
    (a, _), (b, _) = (parse_ops(string, (size, size)) for string in (a, b))
    assert do_the_same(a, b) is same
