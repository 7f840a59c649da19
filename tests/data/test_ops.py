"""Preprocessing strings: what they parse to, and that every fault is answered well."""

import os
import subprocess
import sys

import pytest

from vit_jax.data import OPS, at_full_size, host_tf, parse_ops
from vit_jax.data.ops import check_crops
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
    ("string", "at_fault"),  # the op, and its argument or the remedy
    [
        ("decode|flipp", "flipp flip"),
        ("decode|zoom", "zoom decode inception_crop"),
        ("decode|resize(8", "resize(8"),
        ("decode|resize(size)", "resize(size)"),
        ("decode|__import__('os').abort()", "__import__"),
        ("decode|pad_crop", "pad_crop padding pad_crop(padding)"),
        ("decode|resize(8, True, 0.5, 10)", "resize(8, resize(size=None, antialias=False"),
        ("decode|resize(side=8)", "resize(side=8) side"),
        ("decode|resize(0)", "resize(0) size=0"),
        ("decode|resize((8, 8, 3))", "size=(8, 8, 3)"),
        ("decode|resize(True)", "resize(True) size=True"),
        (f"decode|resize({10**20})", "size="),
        ("decode|resize(antialias='no')", "antialias='no' bool"),
        ("decode|central_crop(pad=1)", "pad=1 bool"),
        ("decode|torchvision_resize(filter='box')", "filter='box'"),
        ("decode|torchvision_resize(cover=1)", "cover=1"),
        ("decode|pad_crop(-1)", "padding=-1 65535"),
        (f"decode|pad_crop({10**20})", "padding= 65535"),
        ("decode|randaugment(2.0, 9)", "layers=2.0 int"),
        ("decode|randaugment(2, -1)", "magnitude=-1"),
        ("decode|resize(crop=1.5)", "crop=1.5 [0.01, 1]"),
        ("decode|resize_small(crop=True)", "crop=True float"),
        ("decode|resize_small(crop=5e-324)", "crop=5e-324"),
        ("inception_crop(area_min=5)", "area_min=5"),
        ("inception_crop(area_min='x')", "area_min='x'"),
        ("inception_crop(area_min=0.5, area_max=0.2)", "area_min=0.5 area_max=0.2"),
        ("mixup(0)", "alpha=0"),
        ("mixup('a')", "alpha='a'"),
        ("cutmix(1e999)", "alpha=inf"),
        ("mixup_or_cutmix(0.8)", "cutmix"),
        ("mixup_or_cutmix(0.8, 0)", "cutmix=0"),
        ("erase(1.5)", "probability=1.5 [0, 1]"),
        ("erase(0.25, 0.5, 0.1)", "area_min=0.5 area_max=0.1"),
        ("color_jitter(1, 0.1, 0.1, 0.1, 0.6)", "hue=0.6"),
        ("blur(1.0, 2.0, 1.0)", "sigma_min=2.0 sigma_max=1.0"),
        ("solarize(1.0, 300)", "threshold=300"),
        ("|".join(3000 * ["flip"]), "3,000 100"),
        ("decode|flip|resize", "'resize' 'decode|resize|flip'"),
        ("resize|decode", "'decode' 'resize'"),
        ("mixup(0.2)|cutmix(1.0)", "mixup(0.2) cutmix(1.0) mixup_or_cutmix"),
        (
            "scaled_decode|randaugment(2, 10)|random_crop(pad=True)|resize",
            "'scaled_decode' 8 x 8 'random_crop(pad=True)' 'decode'",
        ),
        ("scaled_decode(9)|resize_small((8, 10))", "9 x 9 'resize_small((8, 10))'"),
    ],
)
def test_faults_name_the_op_and_its_argument(string, at_fault):
    with pytest.raises(InputError) as error:
        parse_ops(string, (8, 8))
    (fault,) = error.value.faults
    assert fault.startswith("data.ops")
    assert all(word in fault for word in at_fault.split(" "))


def test_every_op_is_declared_once():
    """Each argument has a meaning; a module that declares ops imports no TensorFlow."""
    for name in OPS:
        op = OPS.find(name)
        assert op.__doc__ and all(declared.meaning for declared in op.declared().values())
        assert list(op.signature().parameters) == list(op.declared())
    code = "import sys; from vit_jax.data.ops import parse_ops; parse_ops('decode|flip', (8, 8))"
    words = [sys.executable, "-c", f"{code}; assert 'tensorflow' not in sys.modules"]
    subprocess.run(words, check=True)


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
