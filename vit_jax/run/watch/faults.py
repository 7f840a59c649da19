"""Faults on purpose, by `job.inject`, to test what must find or survive them.

Each is made once in a workdir, before a step; "," separates several. With `every=60s` in the place
of `step=12`, a fault of a process is made 60 s after the run's first start, and again 60 s after
each time. With `every=60s:seed=3` these times are drawn from an exponential distribution with a
mean of 60 s. Faults that last from then on (`clock`, `slow_disk`, `full_disk`) take no `every`. A
flipped bit is the highest of the mantissa of an array's first number.
`run.watch.injected` makes the faults of processes.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import tree
from vit_jax.base.errors import Faults, InputError, collect_faults, nearest

FAULTS = {  # example: meaning
    "flip:weight:device=3:step=12": "one bit of a parameter flips on device 3",
    "flip:activation:device=3:step=12": "one bit of a layer's output flips in the replay",
    "flip:gradient:device=3:step=12": "one bit of a gradient flips in the replay",
    "kill:process=1:step=12": "process 1 is killed (SIGKILL)",
    "term:process=1:step=12": "process 1 is told to save and end (SIGTERM), as by a preemption",
    "stop:process=1:step=12:seconds=5": "process 1 is stopped (SIGSTOP) for 5 seconds",
    "hang:process=1:step=12": "process 1 waits for ever, while its other threads go on",
    "slow:process=1:step=12:seconds=5": "process 1 takes 5 seconds more for the step",
    "lose:process=1:step=12": "process 1 is killed and its copies of steps in host memory are "
                              "removed, as when its host is lost",
    "cut:process=1:step=12": "all TCP connections of process 1 are shut down",
    "clock:process=1:step=12:seconds=-3600": "`time.time` of process 1 goes back an hour; file "
                                             "times do not",
    "slow_disk:process=0:step=12:seconds=0.2": "from now on, process 0 takes 0.2 s more to open a "
                                               "file for writing, rename one or write a row",
    "full_disk:process=0:step=12": "from now on, no file of process 0 can grow (limit of "
                                   "`ulimit -f`)",
    "damage:process=0:step=12": "one bit in the largest file of the newest save flips, half a row "
                                "is written, and process 0 is killed",
}  # fmt: skip
_REPEATED = r"(?!clock|slow_disk|full_disk)\w+:process=\d+"  # the others last from then on
_WORDS = {2: jnp.uint16, 4: jnp.uint32}  # by the bytes of a float


class Fault(NamedTuple):
    """A fault before a step.

    text: as the user writes it.
    kind: the words before the place.
    place: number of a device in the mesh if the kind is a flip, else of a process; from 0.
    step: 0 if the fault is made again and again.
    seconds: that a stop, a jump of the clock, a slow step, or the delay of each write takes.
    every: seconds of wall time between two times, or their mean.
    seed: of the times; None: they are equally far apart.
    times: of the run's first start, and of each time the fault was made, by `time.time`.
    """

    text: str
    kind: str
    place: int
    step: int
    seconds: float = 0.0
    every: float = 0.0
    seed: str | None = None
    times: Sequence[float] = ()

    @property
    def is_flip(self) -> bool:
        return self.kind.startswith("flip:")

    @property
    def is_for_replay(self) -> bool:
        return self.kind in ("flip:activation", "flip:gradient")

    def is_due(self, step: int, now: float) -> bool:
        """Whether the fault is made before `step`, at the time `now`."""
        if not self.every:
            return step == self.step
        wait = self.every
        if self.seed is not None:  # the same at each start of the run
            wait = random.Random(f"{self.seed} {len(self.times)}").expovariate(1 / self.every)
        return now >= self.times[-1] + wait


def parse_faults(text: str | None) -> list[Fault]:
    """The faults that `job.inject` asks for. Raises InputError if one is unknown."""
    return [] if text is None else [_parse(word.strip()) for word in text.split(",")]


def _parse(word: str) -> Fault:
    every = r"(every=([1-9]\d{0,8})s(?::seed=(\d{1,9}))?)"
    times = re.match(f"{_REPEATED}:{every}", word, re.ASCII)
    plain = word.replace(times[1], "step=0") if times else word
    for example in FAULTS:
        form = re.sub(r"seconds=[\d.]+", r"seconds=(\\d{1,6}(?:\\.\\d+)?)", example)
        form = re.sub(r"seconds=-[\d.]+", r"seconds=(-?\\d{1,9}(?:\\.\\d+)?)", form)
        form = re.sub(r"=\d+", r"=(\\d{1,9})", form)
        if match := re.fullmatch(form, plain, re.ASCII):
            place, step, *seconds = match.groups()
            kind = re.sub(r":(device|process)=.*", "", example)
            wait_s = float(seconds[0]) if seconds else 0.0
            fault = Fault(word, kind, int(place), int(step), wait_s)
            return fault._replace(every=float(times[2]), seed=times[3]) if times else fault
    kind = word.partition(":")[0]
    same = [example for example in FAULTS if example.startswith(f"{kind}:")]
    if "every=" in word:
        same = [re.sub(f"^({_REPEATED}):step=12", r"\1:every=60s:seed=3", each) for each in same]
    hint = f"write {' or '.join(same)}" if same else nearest(word, [*FAULTS])
    raise InputError(f"job.inject={word!r}: no such fault; {hint}")


def check_places(
    text: str | None, devices: int, processes: int, durations: Mapping[str, int]
) -> None:
    """Raise InputError unless `job.inject` names devices, processes and steps that a run has.

    `durations`: {key: steps}, as `Settings.durations`.
    """
    faults, steps, every = Faults(), durations["duration"], durations.get("job.replay_every")
    for fault in parse_faults(text):
        key, most = f"job.inject={fault.text!r}", (devices if fault.is_flip else processes) - 1
        what = "devices" if fault.is_flip else "processes"
        faults.need(fault.place <= most, f"{key}: the run has {what} 0 to {most}; name one")
        faults.need(fault.every or 1 <= fault.step <= steps,
                    f"{key}: the run has steps 1 to {steps}; name one")  # fmt: skip
        if fault.is_for_replay:
            faults.need(every and fault.step % every == 0,
                        f"{key}: only a replay meets it; set job.replay_every so that step "
                        f"{fault.step} has one")  # fmt: skip
    flips = [fault.step for fault in parse_faults(text) if fault.is_for_replay]
    faults.need(len(flips) == len({*flips}),
                f"job.inject={text!r}: two flips for one replay; give other steps")  # fmt: skip
    collect_faults(faults)


def flip_bit(x: jax.Array, where: jax.Array) -> jax.Array:
    """`x`, of a float dtype, with the bit flipped if `where`; gradients pass as if it were not."""
    word, first = _WORDS[x.dtype.itemsize], (0,) * x.ndim
    mask = jnp.asarray(where, word) << (8 * x.dtype.itemsize - 10)
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(x), word)
    bits = bits.at[first].set(bits[first] ^ mask)
    flipped = jax.lax.bitcast_convert_type(bits, x.dtype)
    return x + jax.lax.stop_gradient(flipped - x)  # exact: one is at most twice the other


def flip_weight(params: tree.Params, device: jax.Device) -> tree.Params:
    """`params` with the bit flipped in the copy of the largest parameter on one device."""
    leaves = tree.flatten_names(params)
    name = max(leaves, key=lambda name: leaves[name].size)
    leaf = leaves[name]
    shards = [shard.data for shard in leaf.addressable_shards]
    for i, shard in enumerate(shards):
        if {device} == shard.devices():
            wrong = np.array(shard)
            wrong.reshape(-1).view(np.uint32)[0] ^= 1 << 22
            shards[i] = jax.device_put(wrong, shard.sharding)
    leaves[name] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
    return tree.unflatten_names(leaves)


def flip_activation(where: jax.Array) -> Any:
    """A context in which the output of the first layer of a Linen model has the bit flipped."""
    chosen: list[tuple[str, ...]] = []

    def intercept(
        call: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        out = call(*args, **kwargs)
        if not isinstance(out, jax.Array):
            return out
        chosen[:] = chosen or [context.module.path]  # the same in every trace
        return flip_bit(out, where) if chosen == [context.module.path] else out

    return nn.intercept_methods(intercept)
