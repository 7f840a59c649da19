"""LiteRT files for phones, one image a call, by TensorFlow's converter from a StableHLO program.

float16 and int8 are the converter's own quantisation: float16 of the stored weights, int8 of
weights and activations.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np
from etils import epath

from vit_jax.base.files import write_whole
from vit_jax.transfer.program import Program

PACKAGES = ("ai_edge_litert",)
DEVICE = "cpu"
_COMPOSITE = r'stablehlo\.composite "[^"]+" ([^{]*?) \{.*?decomposition = (@[\w."]+).*?\} :'
PRECISIONS = ("float32", "float16", "int8")
SPLITS = False


def convert(path: epath.Path, program: Program) -> tuple[list[str], dict[str, Any]]:
    """Write the program; return the names of the files, and facts for the receipt."""
    import tensorflow as tf
    from jax.experimental import jax2tf
    from jax.extend.mlir.dialects import stablehlo

    one = jax.ShapeDtypeStruct((1, *program.shape), program.dtype)
    exported = jax.export.export(jax.jit(program.call), platforms=("cpu",))(one)
    # The converter does not know composites, such as erf: their functions are called instead.
    text = re.sub(_COMPOSITE, r"func.call \2(\1) :", exported.mlir_module())
    module = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
    exported = dataclasses.replace(exported, mlir_module_serialized=module)
    function = tf.function(
        jax2tf.convert(exported.call, with_gradient=False),
        autograph=False,
        input_signature=[tf.TensorSpec(one.shape, one.dtype)],
    )
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [function.get_concrete_function()], function
    )
    if program.precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if program.precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if program.precision == "int8":
        converter.representative_dataset = lambda: ([image[None]] for image in program.samples)
    write_whole(path, converter.convert())
    return [path.name], {"converter": f"tensorflow {tf.__version__}"}


def load(path: epath.Path) -> Callable[[np.ndarray], np.ndarray]:
    """The function images -> outputs of a file of `convert`, on the CPU."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=path.read_bytes())
    interpreter.allocate_tensors()
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(images: np.ndarray) -> np.ndarray:
        found = []
        for image in images:
            interpreter.set_tensor(taken["index"], image[None])
            interpreter.invoke()
            found.append(interpreter.get_tensor(given["index"])[0])
        return np.stack(found)

    return run
