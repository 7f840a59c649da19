"""The end of TensorFlow's iterators: it waits for no thread, and comes before the interpreter's."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import vit_jax
from vit_jax.data.elements import Elements
from vit_jax.data.host_tf import tf

# A program that ends while threads of TensorFlow run Python, as a conversion by Pillow does; one
# iterator has failed, and its error is kept.
ENDS_WHILE_PYTHON_RUNS = """
import time
from vit_jax.data.elements import Elements
from vit_jax.data.host_tf import tf

def convert(i):
    if i == 5:
        raise ValueError("no image")
    time.sleep(2 * (i > 5))
    return i

numbers = tf.data.Dataset.range(9)
dataset = numbers.map(lambda i: tf.numpy_function(convert, [i], tf.int64), num_parallel_calls=3)
alive, failing = [Elements(dataset) for _ in range(10)], Elements(dataset)
try:
    print(*failing)
except tf.errors.InvalidArgumentError as e:
    error = e
print("failed:", *[next(elements) for elements in alive for _ in range(4)], next(failing, "ended"))
"""


def num_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.exists("/proc"), reason="counts threads as Linux lists them")
def test_iterator_has_no_thread_that_tunes():
    several = [Elements(tf.data.Dataset.range(3)) for _ in range(20)]
    before = num_threads()
    assert [next(elements) for elements in several] == [0] * 20
    assert num_threads() < before + 20  # TensorFlow starts tuning with the first element


@pytest.mark.slow
def test_program_ends_while_an_iterator_runs_python():
    program = [sys.executable, "-c", ENDS_WHILE_PYTHON_RUNS]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert (ended.stdout, ended.returncode) == (f"failed: {'0 1 2 3 ' * 10}ended\n", 0), (
        ended.stderr
    )


def test_no_other_module_makes_or_tunes_iterators():
    found = {
        path.name
        for path in pathlib.Path(vit_jax.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"as_numpy_iterator|AUTOTUNE|(?<!\))\.get_single_element", line)
    }
    assert found == {"elements.py"}
