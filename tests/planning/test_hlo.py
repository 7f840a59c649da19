"""Reading compiled programs: written by hand here, and one that XLA has made."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax.devices.mesh import make_mesh
from vit_jax.planning.hlo import Collective, Program


def program(name, **places):
    """The program of programs/NAME.hlo, with a text in each of the `places`."""
    text = (pathlib.Path(__file__).parent / f"programs/{name}.hlo").read_text()
    for place, value in places.items():
        text = text.replace(place, value)
    return Program(text)


@pytest.fixture(scope="module")
def scanned():
    return program("scanned")


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
    known = 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    assert program("scanned", **{"body=%body": known}).cycles() == 3 * (1000 + 10) + 5


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
    (found,) = program("groups", GROUPS=written).collectives()
    assert found.groups == groups


def test_arrays_that_are_exchanged_together_all_count():
    found = {each.kind: each.size for each in program("together").collectives()}
    a, b = 4 * 8 * 2, 2 * 3 * 4
    assert found == {
        "all-gather": 4 * (a + b), "reduce-scatter": a, "all-reduce": a + b,
        "collective-permute": b,
    }  # fmt: skip


def test_exchanges_that_share_a_channel_all_count():
    """As those of one `jax.shard_map` do; the fusions of an asynchronous one have its chain."""
    found = [each.asynchronous for each in program("one_channel").collectives()]
    assert found == [True, True, False, False]


@pytest.mark.parametrize(("target", "number"), [("{1,2}x{0:3}", 2), ("{1:4}x{0:1}", 4)])
def test_exchanges_between_slices_go_through_hosts(target, number):
    (found,) = program("slices", TARGET=target).collectives()
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
    (found,) = program("around_a_loop").collectives()
    assert (found.count, found.asynchronous) == (1, True)
