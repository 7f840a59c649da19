"""ONNX files by jax2onnx, for any number of images, run by onnxruntime.

float16 is onnxruntime's conversion, with inputs and outputs as before; int8 is its static
quantisation of the weights and inputs of dense layers and convolutions. Weights of 2 GiB and more
are in a second file, as a file of ONNX holds no more.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from vit_jax.base.files import open_for_append, write_whole
from vit_jax.base.quiet import quiet
from vit_jax.transfer.program import MOST_BYTES, Program

if TYPE_CHECKING:
    from onnx import ModelProto

PACKAGES = ("onnxruntime", "jax2onnx")
DEVICE = "cpu"
PRECISIONS = ("float32", "float16", "int8")
SPLITS = True
OPSET = 21
_LOGGERS = ("jax2onnx", "onnx_ir", "root")
_SMALL = 1024  # bytes of an array that stays in the file, as shapes must
_PRODUCT = b"abc,cd->abd"  # of all tokens with a matrix, as jax2onnx writes it


def convert(path: epath.Path, program: Program) -> tuple[list[str], dict[str, Any]]:
    """Write the program; return the names of the files, and facts for the receipt."""
    # jax2onnx prints each of its steps.
    with contextlib.redirect_stdout(io.StringIO()), quiet(*_LOGGERS):
        from jax2onnx import to_onnx

        model = to_onnx(
            program.call,
            [program.inputs],
            opset=OPSET,
            input_names=[program.name],
            output_names=["outputs"],
        )
    if program.precision == "float16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        with _stored(model) as file:  # a model in memory may have 2 GiB at most
            model = convert_float_to_float16(file, keep_io_types=True)
    if program.precision == "int8":
        model = _quantise(model, program.samples)
    return _write(path, model), {"opset": OPSET}


def _quantise(model: "ModelProto", samples: Sequence[np.ndarray]) -> "ModelProto":
    """The model in int8, with ranges of values from `samples`, images of the program."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    class Samples(CalibrationDataReader):
        left = iter(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.left, None)
            return None if image is None else {model.graph.input[0].name: image[None]}

    scalars = [array for array in model.graph.initializer if not array.dims]
    zeros = {array.name for array in scalars if not onnx.numpy_helper.to_array(array)}
    for node in model.graph.node:
        if [a.s for a in node.attribute if node.op_type == "Einsum"] == [_PRODUCT]:
            node.op_type = "MatMul"  # the quantiser leaves Einsum in float32
            del node.attribute[:]
        if node.op_type == "Gemm" and zeros.issuperset(node.input[2:]):
            del node.input[2:]  # a bias that has no axis, which the quantiser needs
    split = _num_bytes(model) > MOST_BYTES
    with quiet(*_LOGGERS), _stored(model) as file:
        quantize_static(
            file,
            made := f"{file}.int8",
            Samples(),
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            per_channel=True,
            reduce_range=True,  # x86 without VNNI adds products of 8 bits in 16
            activation_type=QuantType.QUInt8,  # int8 gives T2T zero points of another type
            use_external_data_format=split,
        )
        return onnx.load(made)


@contextlib.contextmanager
def _stored(model: "ModelProto") -> Iterator[str]:
    """The model's file in a temporary folder; `model` loses the arrays of a second file."""
    with tempfile.TemporaryDirectory() as folder:
        _write(epath.Path(folder) / "model.onnx", model)
        yield os.path.join(folder, "model.onnx")


def _write(path: epath.Path, model: "ModelProto") -> list[str]:
    """Write a model; return the names of the files. `model` loses the arrays of a second file."""
    from onnx.external_data_helper import set_external_data

    data = path.with_name(f"{path.name}.data")
    arrays = [array for array in model.graph.initializer if len(array.raw_data) > _SMALL]
    if split := _num_bytes(model) > MOST_BYTES:
        open_for_append(data, (array.raw_data for array in arrays)).close()
        start = 0
        for array in arrays:
            size = len(array.raw_data)
            set_external_data(array, data.name, start, size)
            array.ClearField("raw_data")
            start += size
    write_whole(path, model.SerializeToString())
    return [path.name, data.name] if split else [path.name]


def _num_bytes(model: "ModelProto") -> int:
    return sum(len(array.raw_data) for array in model.graph.initializer)


def load(path: epath.Path) -> Callable[[np.ndarray], np.ndarray]:
    """The function images or token ids -> outputs of a file of `convert`, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; its warnings are about graphs that it mends
    session = onnxruntime.InferenceSession(
        os.fspath(path), options, providers=["CPUExecutionProvider"]
    )
    (taken,) = session.get_inputs()
    return lambda images: session.run(None, {taken.name: images})[0]
