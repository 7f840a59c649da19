"""Reading compiled programs: written by hand here, and one that XLA has made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax.devices.mesh import make_mesh
from vit_jax.planning.hlo import Collective, Program

# A loop of 24, which gathers beside its products (three fusions, one channel), reduces gradients
# of which each device keeps a part, and takes one layer of a stacked array; then a plain sum.
SCANNED = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%start (p0: bf16[8,64]) -> (bf16[8,64], bf16[64,64]) {
  %p0 = bf16[8,64]{1,0} parameter(0)
  %gather.1 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=7, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}
  ROOT %both = (bf16[8,64]{1,0}, bf16[64,64]{1,0}) tuple(%p0, %gather.1)
}

%async_collective_fusion.3 (p1: bf16[8,64], p2: bf16[4,64]) -> bf16[4,64] {
  %p1 = bf16[8,64]{1,0} parameter(0)
  %gather.2 = bf16[64,64]{1,0} all-gather(%p1), channel_id=7, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}
  ROOT %p2 = bf16[4,64]{1,0} parameter(1)
}

%all-reduce-scatter.1 (p3: f32[64,64]) -> f32[8,64] {
  %p3 = f32[64,64]{1,0} parameter(0)
  %reduced = f32[64,64]{1,0} all-reduce(%p3), channel_id=9, replica_groups=[1,8]<=[8], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[8,64]{1,0} dynamic-slice(%reduced, %zero, %zero), dynamic_slice_sizes={8,64}
}

%layer (p4: f32[24,16], p5: s32[]) -> f32[1,16] {
  %p4 = f32[24,16]{1,0} parameter(0)
  %p5 = s32[] parameter(1)
  %none = s32[] constant(0)
  ROOT %one = f32[1,16]{1,0} dynamic-slice(%p4, %p5, %none), dynamic_slice_sizes={1,16}
}

%outer (p6: f32[24,16], p7: s32[]) -> f32[1,16] {
  %p6 = f32[24,16]{1,0} parameter(0)
  %p7 = s32[] parameter(1)
  %same = f32[24,16]{1,0} bitcast(%p6)
  ROOT %inner = f32[1,16]{1,0} fusion(%same, %p7), kind=kLoop, calls=%layer
}

%body (state: (s32[], f32[24,16])) -> (s32[], f32[24,16]) {
  %state = (s32[], f32[24,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[24,16]{1,0} get-tuple-element(%state), index=1
  %w = bf16[8,64]{1,0:S(1)} copy(%stack)
  %async-collective-start = (bf16[8,64]{1,0:S(1)}, bf16[64,64]{1,0:S(1)}) fusion(%w), kind=kCustom, calls=%start
  %x = bf16[4,64]{1,0:S(1)} fusion(%w, %w), kind=kOutput, calls=%async_collective_fusion.3, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %g = f32[64,64]{1,0:S(1)} convert(%x)
  %mine = f32[8,64]{1,0:S(1)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %taken = f32[1,16]{1,0:S(1)} fusion(%stack, %i), kind=kLoop, calls=%outer, backend_config={"estimated_cycles":"10"}
  ROOT %next = (s32[], f32[24,16]{1,0}) tuple(%i, %stack)
}

%more (other: (s32[], f32[24,16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(24)
  %other = (s32[], f32[24,16]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%other), index=0
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (a: f32[24,16]) -> f32[24,16] {
  %a = f32[24,16]{1,0} parameter(0)
  %nought = s32[] constant(0)
  %init = (s32[], f32[24,16]{1,0}) tuple(%nought, %a)
  %while.1 = (s32[], /*index=1*/f32[24,16]{1,0:T(8,128)}) while(%init), condition=%more, body=%body
  %out = f32[24,16]{1,0} get-tuple-element(%while.1), index=1
  %norm = (f32[16]{0:S(1)}, f32[]{:S(1)}) all-reduce(%out, %out), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  ROOT %scaled = f32[24,16]{1,0} multiply(%out, %out), backend_config={"estimated_cycles":"5"}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def scanned():
    return Program(SCANNED)


def test_exchanges_count_as_often_as_their_loop_runs(scanned):
    everyone = (tuple(range(8)),)
    assert scanned.collectives() == [
        Collective("all-gather", everyone, 64 * 64 * 2, 24, asynchronous=True),
        Collective("reduce-scatter", everyone, 64 * 64 * 4, 24, asynchronous=False),
        Collective("all-reduce", ((0, 4), (1, 5), (2, 6), (3, 7)), 17 * 4, 1, asynchronous=False),
    ]


def test_cycles_count_as_often_as_their_loop_runs(scanned):
    assert scanned.cycles() == 24 * (1000 + 10) + 5


def test_bytes_are_those_of_slices_and_of_hbm(scanned):
    # The copy reads the stack; the slice of it one row; the rest of the body is on the chip. After
    # the loop the sum reads the stack twice, and so does the product, which writes it too.
    stack, row = 24 * 16 * 4, 16 * 4
    assert scanned.bytes_accessed() == 24 * (stack + row + 4) + 2 * stack + 3 * stack


def test_known_trip_counts_are_believed():
    text = SCANNED.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    )
    assert Program(text).cycles() == 3 * (1000 + 10) + 5


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_0'}", ((0, 2), (1, 3))),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_0','axis_1'}", ((0, 1, 2, 3),)),
        ("mesh['axis_0'=4] {'axis_0':(1)2}", ((0, 2), (1, 3))),
        ("mesh['axis_0'=4] {'axis_0':(2)2}", ((0, 1), (2, 3))),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=2], device_ids=([2,2]T(1,0)) {'axis_2'}",
         ((0, 2), (1, 3))),
        ("mesh['axis_0'=2,'axis_1'=2], device_ids=(3,1,2,0) {'axis_1'}", ((3, 1), (2, 0))),
        ("{}", ((0, 1, 2, 3),)),
    ],
)  # fmt: skip
def test_groups_however_they_are_written(written, groups):
    text = f"""
HloModule step, num_partitions=4

ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  ROOT %sum = f32[4]{{0}} all-reduce(%a), channel_id=1, replica_groups={written}, use_global_device_ids=true, to_apply=%add
}}
"""  # noqa: E501
    (found,) = Program(text).collectives()
    assert found.groups == groups


def test_arrays_that_are_exchanged_together_all_count():
    text = """
HloModule step, num_partitions=4

ENTRY %main (a: bf16[4,8], b: f32[2,3]) -> f32[8,3] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = f32[2,3]{1,0} parameter(1)
  %gather = ((bf16[4,8]{1,0}, /*index=1*/f32[2,3]{1,0}), (bf16[16,8]{1,0}, f32[8,3]{1,0})) all-gather-start(%a, /*index=1*/%b), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %scatter = ((bf16[4,8]{1,0}), bf16[1,8]{1,0}) reduce-scatter-start(%a), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
  %sum = (bf16[4,8]{1,0}, f32[2,3]{1,0}) all-reduce-start(%a, %b), channel_id=3, replica_groups=[1,4]<=[4], to_apply=%add
  %moved = (f32[2,3]{1,0}, f32[2,3]{1,0}, u32[], u32[]) collective-permute-start(%b), channel_id=4, source_target_pairs={{0,1},{1,2}}
  ROOT %out = f32[8,3]{1,0} constant(0)
}
"""  # noqa: E501
    found = {each.kind: each.size for each in Program(text).collectives()}
    a, b = 4 * 8 * 2, 2 * 3 * 4
    assert found == {
        "all-gather": 4 * (a + b), "reduce-scatter": a, "all-reduce": a + b,
        "collective-permute": b,
    }  # fmt: skip


def test_exchanges_that_share_a_channel_all_count():
    """As those of one `jax.shard_map` do; the fusions of an asynchronous one have its chain."""
    gather = "all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}"
    fusions = "".join(
        f"""
%async_collective_fusion.{i} (p: bf16[4]) -> bf16[16] {{
  %p = bf16[4]{{0}} parameter(0)
  ROOT %gather.{i} = bf16[16]{{0}} {gather}, frontend_attributes={{chain_id="{chain}"}}
}}
"""
        for i, chain in enumerate((0, 0, 1))
    )
    calls = "\n".join(
        f"  %fusion.{i} = bf16[16]{{0}} fusion(%p), calls=%async_collective_fusion.{i}"
        for i in range(3)
    )
    text = f"""
HloModule step, num_partitions=4
{fusions}
ENTRY %main (p: bf16[4]) -> bf16[4] {{
  %p = bf16[4]{{0}} parameter(0)
{calls}
  %gather.3 = bf16[16]{{0}} {gather}
  %gather.4 = bf16[16]{{0}} {gather}
  ROOT %out = bf16[4]{{0}} add(%p, %p)
}}
"""
    found = [each.asynchronous for each in Program(text).collectives()]
    assert found == [True, True, False, False]


@pytest.mark.parametrize(("target", "number"), [("{1,2}x{0:3}", 2), ("{1:4}x{0:1}", 4)])
def test_exchanges_between_slices_go_through_hosts(target, number):
    text = f"""
HloModule step, num_partitions=4

ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %token = token[] after-all()
  %send = (f32[4]{{0}}, u32[], token[]) send(%a, %token), channel_id=3, is_host_transfer=true, frontend_attributes={{_xla_megascale_target="{target}",_xla_megascale_transfer_type="ALL_REDUCE"}}
  %recv = (f32[4]{{0}}, u32[], token[]) recv(%token), channel_id=2, is_host_transfer=true, frontend_attributes={{_xla_megascale_target="{target}",_xla_megascale_transfer_type="ALL_REDUCE"}}
  ROOT %sum = f32[4]{{0}} copy(%a)
}}
"""  # noqa: E501
    (found,) = Program(text).collectives()
    assert (found.kind, found.size, found.count, found.asynchronous) == ("all-reduce", 16, 1, True)
    assert len(found.groups) == 4 and found.groups[1] == tuple(range(1, 4 * number, 4))


def test_bytes_sent_by_a_ring():
    def sent(kind):
        return Collective(kind, (tuple(range(4)),), 1000, 1, False).sent

    assert sent("all-gather") == sent("reduce-scatter") == sent("all-to-all") == 750
    assert sent("all-reduce") == 1500
    assert sent("collective-permute") == 1000


def test_program_that_xla_has_made():
    mesh = make_mesh(replica=1, data=2, fsdp=2, tensor=2)

    def step(x):
        def layer(x, _):
            return jax.lax.psum(x, "fsdp") * 0.5, jax.lax.all_gather(x, "data").sum()

        return jax.lax.scan(layer, x, length=5)

    step = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()),
                         check_vma=False)  # fmt: skip
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    found = Program(jax.jit(step).lower(x).compile().as_text()).collectives()
    by_kind = {each.kind: each for each in found}
    assert by_kind["all-reduce"].groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert by_kind["all-gather"].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert {each.count for each in found} == {5}
    assert by_kind["all-reduce"].size == 4 * 16 * 4
    assert by_kind["all-gather"].size == np.prod((2, 4, 16)) * 4


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        Program("HloModule nothing")


def test_an_exchange_behind_a_whole_loop_counts_once():
    """Its start and end stand around the loop, whose body takes its steps."""
    gather = 'all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, frontend_attributes={chain_id="0"}'  # noqa: E501
    fusions = "".join(
        f"""
%async_collective_fusion.{i} (p: bf16[4]) -> bf16[16] {{
  %p = bf16[4]{{0}} parameter(0)
  ROOT %gather.{i} = bf16[16]{{0}} {gather}
}}
"""
        for i in range(3)
    )
    start, step, end = (
        f"%fusion.{i} = bf16[16]{{0}} fusion(%p), calls=%async_collective_fusion.{i}"
        for i in range(3)
    )
    text = f"""
HloModule step, num_partitions=4
{fusions}
%body (p: bf16[4]) -> bf16[4] {{
  %p = bf16[4]{{0}} parameter(0)
  {step}
  ROOT %next = bf16[4]{{0}} add(%p, %p)
}}

%more (p: bf16[4]) -> pred[] {{
  %p = bf16[4]{{0}} parameter(0)
  ROOT %less = pred[] constant(true)
}}

ENTRY %main (p: bf16[4]) -> bf16[4] {{
  %p = bf16[4]{{0}} parameter(0)
  {start}
  %looped = bf16[4]{{0}} while(%p), condition=%more, body=%body, backend_config={{"known_trip_count":{{"n":"255"}}}}
  {end}
  ROOT %out = bf16[4]{{0}} add(%looped, %p)
}}
"""  # noqa: E501
    assert [(each.count, each.asynchronous) for each in Program(text).collectives()] == [(1, True)]
