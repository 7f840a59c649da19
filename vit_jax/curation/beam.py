"""Shards made by Apache Beam, on any of its runners: Dataflow, Flink, Spark, or this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.base.errors import InputError
from vit_jax.curation.prepare import Runner
from vit_jax.curation.shards import Plan, Shard, make_shard


def on_beam(options: Sequence[str]) -> Runner:
    """Makes shards by a Beam pipeline with these options; raises InputError without Beam."""
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
        from apache_beam.runners.runner import PipelineState
    except ImportError as e:
        raise InputError(f"--beam: {e}; run pip install -e '.[curation]'") from None

    def run(plan: Plan, shards: Sequence[Shard], add: Callable[[Mapping[str, Any]], None]) -> None:
        def make(shard: Sequence[Any]) -> Mapping[str, Any]:
            record = make_shard(plan, Shard(*shard))
            beam.metrics.Metrics.counter("vit_jax", "pictures").inc(record["records"])
            return record

        pipeline = beam.Pipeline(options=PipelineOptions([*options]))
        made = pipeline | beam.Create([tuple(shard) for shard in shards]) | beam.Reshuffle()
        made | beam.Map(make)
        state = pipeline.run().wait_until_finish()
        if state != PipelineState.DONE:
            raise InputError(
                f"--beam: the pipeline ended in the state {state}; see the logs of its runner, and "
                "run the command again, which keeps finished shards"
            )

    return run
