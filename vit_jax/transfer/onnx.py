"""ONNX files by jax2onnx, for any number of images, run by onnxruntime.

float16 is onnxruntime's conversion, with inputs and outputs as before; int8 is its static
quantisation of the weights and inputs of dense layers and convolutions.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base.files import write_whole
from vit_jax.transfer.program import Program

PACKAGES = ("onnxruntime", "jax2onnx")
DEVICE = "cpu"
PRECISIONS = ("float32", "float16", "int8")
OPSET = 21
_INPUT = "images"
_PRODUCT = b"abc,cd->abd"  # of all tokens with a matrix, as jax2onnx writes it


def convert(path: epath.Path, program: Program) -> dict[str, Any]:
    """Write the program; return facts for the receipt."""
    with contextlib.redirect_stdout(io.StringIO()), _quiet():  # jax2onnx prints what it does
        from jax2onnx import to_onnx

        model = to_onnx(
            program.call,
            [program.images],
            opset=OPSET,
            input_names=[_INPUT],
            output_names=["outputs"],
        )
    if program.precision == "float16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        model = convert_float_to_float16(model, keep_io_types=True)
    if program.precision == "int8":
        for node in model.graph.node:  # the quantiser leaves Einsum in float32
            if [a.s for a in node.attribute if node.op_type == "Einsum"] == [_PRODUCT]:
                node.op_type = "MatMul"
                del node.attribute[:]
    write_whole(path, model.SerializeToString())
    if program.precision == "int8":
        from onnxruntime.quantization import QuantType, quantize_static
        from onnxruntime.quantization.calibrate import CalibrationDataReader

        class Samples(CalibrationDataReader):
            left = iter(program.samples)

            def get_next(self) -> dict[str, np.ndarray] | None:
                image = next(self.left, None)
                return None if image is None else {_INPUT: image[None]}

        with _quiet():
            quantize_static(
                path,
                path,
                Samples(),
                op_types_to_quantize=["Conv", "Gemm", "MatMul"],
                per_channel=True,
                reduce_range=True,  # x86 without VNNI adds products of 8 bits in 16
                activation_type=QuantType.QUInt8,  # int8 gives T2T zero points of another type
            )
    return {"opset": OPSET}


def load(path: epath.Path) -> Callable[[np.ndarray], np.ndarray]:
    """The function images -> outputs of a file of `convert`, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; its warnings are about graphs that it mends
    session = onnxruntime.InferenceSession(
        path.read_bytes(), options, providers=["CPUExecutionProvider"]
    )
    return lambda images: session.run(None, {_INPUT: images})[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("jax2onnx", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
