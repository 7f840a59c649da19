"""The work of `prepare` and `duplicates` by Apache Beam, on any runner: Dataflow, Flink, Spark."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base.errors import OneProcessError
from vit_jax.curation.duplicates import (
    FOLDER,
    Finder,
    Part,
    hashes_of,
    keys_of,
    pairs_within,
)
from vit_jax.curation.prepare import Progress, Runner

_POLL_MS = 10_000
_AT_ONCE = 1000  # hashes whose keys are made together


class Beam:
    """Pipelines with the options of Beam."""

    def __init__(self, options: Sequence[str]):
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions

        self.beam = apache_beam
        self.pipeline = functools.partial(apache_beam.Pipeline, options=PipelineOptions([*options]))

    def run(self, pipeline: Any, progress: Progress | None = None) -> None:
        """Run to the end; raises OneProcessError if the pipeline's last state is not DONE."""
        from apache_beam.runners.runner import PipelineState

        result = pipeline.run()
        while not PipelineState.is_terminal(result.state):
            result.wait_until_finish(_POLL_MS)
            if progress is not None:
                progress.reach(_count(result, "parts"), _count(result, "pictures"))
        if result.state != PipelineState.DONE:
            raise OneProcessError(
                f"--beam: the pipeline ended in the state {result.state}; see the logs of its "
                "runner, and run the command again, which keeps what is finished"
            )


def _count(result: Any, name: str) -> int:
    """A counter of a running pipeline; 0 if its runner gives none."""
    from apache_beam.metrics import MetricsFilter

    found = result.metrics().query(MetricsFilter().with_name(name))["counters"]
    return sum(counter.result for counter in found)


def on_beam(options: Sequence[str]) -> Runner:
    """Calls the function with each item in a pipeline with these options."""
    engine = Beam(options)
    beam = engine.beam

    def run(
        function: Callable[[Any], Mapping[str, Any]], items: Sequence[Any], progress: Progress
    ) -> None:
        def call(item: bytes) -> None:
            result = function(pickle.loads(item))
            beam.metrics.Metrics.counter("vit_jax", "pictures").inc(result["records"])
            beam.metrics.Metrics.counter("vit_jax", "parts").inc()

        pipeline = engine.pipeline()
        parts = pipeline | beam.Create([*map(pickle.dumps, items)]) | beam.Reshuffle()
        parts | beam.Map(call)
        engine.run(pipeline, progress)

    return run


def pairs_on_beam(options: Sequence[str], folder: epath.Path) -> Finder:
    """As `duplicates.pairs_here`, by two GroupByKeys: of equal hashes, and of equal keys.

    The pairs pass through text files in a folder below `folder`, which is emptied first.
    """
    engine, passed = Beam(options), folder / FOLDER / "pairs"
    beam = engine.beam

    def run(parts: Sequence[Part], distance: int) -> np.ndarray:
        number = parts[-1].offset + parts[-1].stop
        pipeline = engine.pipeline()
        of_hash = (
            pipeline
            | beam.Create([*map(pickle.dumps, parts)])
            | beam.Reshuffle()
            | "hashes" >> beam.FlatMap(_hashes)
            | "equal hashes" >> beam.GroupByKey()
        )
        same = of_hash | "same" >> beam.FlatMapTuple(_same)
        near = (
            of_hash
            | "first" >> beam.MapTuple(lambda hashed, ids: (hashed, min(ids)))
            | beam.BatchElements(_AT_ONCE, _AT_ONCE)
            | "keys" >> beam.FlatMap(_keys, number)
            | "equal keys" >> beam.GroupByKey()
            | "near" >> beam.FlatMap(_near, distance, number)
        )
        passed.rmtree(missing_ok=True)  # of a run that was stopped
        (same, near) | beam.Flatten() | beam.io.WriteToText(f"{passed}/pairs")
        engine.run(pipeline)
        files = [path for path in passed.iterdir() if path.is_file()]
        found = [np.fromstring(path.read_text(), np.int64, sep=" ") for path in files]
        passed.rmtree()
        return np.concatenate([*found, np.empty(0, np.int64)]).reshape(-1, 3)

    return run


def _hashes(part: bytes) -> Iterator[tuple[bytes, int]]:
    found: Part = pickle.loads(part)
    first = 2 * (found.offset + found.first)
    for i, hashed in enumerate(hashes_of(found).reshape(-1, 4), first):
        if hashed.any():
            yield hashed.tobytes(), i


def _same(hashed: bytes, ids: Sequence[int]) -> Iterator[str]:
    first, *others = sorted(ids)
    return (f"{first} {other} 0" for other in others)


def _keys(batch: Sequence[tuple[bytes, int]], number: int) -> Iterator[Any]:
    hashes = np.frombuffer(b"".join(hashed for hashed, _ in batch), np.uint64).reshape(-1, 4)
    for nth, keys in enumerate(keys_of(hashes, number)):
        for key, row in zip(keys.tolist(), batch, strict=True):
            yield (nth, key), row


def _near(bucket: tuple[Any, Sequence[Any]], distance: int, number: int) -> Iterator[str]:
    (nth, _), rows = bucket
    hashes, ids = zip(*rows, strict=True)
    of_ids = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4)
    same = np.zeros(len(ids), np.uint8)
    for pairs in pairs_within(same, np.array(ids), of_ids, distance, nth, number):
        yield from (f"{a} {b} {apart}" for a, b, apart in pairs.tolist())
