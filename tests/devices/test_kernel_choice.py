"""Which operations a model gets, and that kernels compute under a mesh what it computes without."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tpu_form import fastest_on_tpu

from vit_jax.devices import kernels
from vit_jax.devices.kernels import choose_ops, has_kernels
from vit_jax.devices.mesh import make_mesh
from vit_jax.devices.sharding import constrain
from vit_jax.models import create_model
from vit_jax.models.block_ops import PLAIN, multiply_on_cpu

SIZES = {"width": 32, "depth": 2, "mlp_dim": 32, "num_heads": 4, "patch_size": 8}


@dataclasses.dataclass(frozen=True)
class FakeMesh:
    """A mesh of one device of any platform."""

    platform: str
    tensor: int = 1
    device_kind: str = "TPU v5e"
    compute_capability: str = "9.0"

    @property
    def devices(self):
        return np.array([self], dtype=object)

    @property
    def shape(self):
        return {"tensor": self.tensor}


def small_model(image_size=24, **fields):
    return create_model("ViT-Ti/16", 5, image_size, **(SIZES | fields))


def loss_and_grads(model, mesh):
    """Of two images, with parameters that are the same in every form."""
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, 24, 3)), jnp.float32)

    def loss(params):
        return (model.apply(params, images, train=True) ** 2).sum()

    with jax.set_mesh(mesh):
        params = jax.jit(model.clone(ops=PLAIN).init)(jax.random.key(0), images)
        params = jax.tree.map(
            lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
        )
        return jax.jit(jax.value_and_grad(loss))(params)


def pairs_with_floors(found, expected, floor, floor_of_keys):
    """(leaf, its reference, the least size that an error is a share of), of (loss, gradients).

    Softmax ignores what the bias of the keys adds, so its gradient is zero but for rounding.
    """
    expected = jax.tree.leaves_with_path(expected)
    for x, (path, reference) in zip(jax.tree.leaves(found), expected, strict=True):
        of_keys = jax.tree_util.keystr(path).endswith("['key']['bias']")
        yield x, reference, floor_of_keys if of_keys else floor


def assert_same(found, expected):
    for x, reference, floor in pairs_with_floors(found, expected, 0.02, 0.03):
        scale = max(np.abs(reference).max(), floor)
        np.testing.assert_allclose(x, reference, rtol=0, atol=2e-5 * scale)


def test_kernels_are_chosen_by_platform_and_key(cudnn_by_xla):
    model = small_model(dtype="bfloat16")
    chosen = {
        (platform, kernels): has_kernels(choose_ops(model, FakeMesh(platform), kernels))
        for platform in ("cpu", "gpu", "tpu")
        for kernels in ("auto", "plain")
    }
    assert {key for key, found in chosen.items() if found} == {("gpu", "auto"), ("tpu", "auto")}
    assert choose_ops(model, FakeMesh("cpu")).ops.multiply is multiply_on_cpu


@pytest.mark.parametrize(
    ("platform", "fields", "tensor", "words"),
    [
        ("tpu", {"pos_embed": "relative"}, 1, ["model.pos_embed=relative"]),
        ("tpu", {"attention_dropout": 0.1}, 1, ["model.attention_dropout=0.1"]),
        ("tpu", {"num_heads": 8}, 1, ["4 wide", "8 does not divide"]),
        ("tpu", {}, 3, ["mesh.tensor=3", "model.num_heads=4"]),
        ("tpu", {"patch_size": 1, "image_size": 28}, 1, ["785 tokens", "1000"]),
        ("gpu", {"dtype": "float32"}, 1, ["cuDNN", "bfloat16", "float32"]),
        ("gpu", {"dtype": "bfloat16"}, 3, ["mesh.tensor=3", "model.num_heads=4"]),
        ("gpu", {"dtype": "bfloat16", "pos_embed": "relative"}, 1, ["model.pos_embed=relative"]),
        ("gpu", {"dtype": "bfloat16", "attention_dropout": 0.1}, 1, ["attention_dropout=0.1"]),
    ],
)
def test_one_line_says_what_has_no_kernel(platform, fields, tensor, words, caplog):
    model = create_model("ViT-Ti/16", 5, **({"image_size": 24} | SIZES | fields))
    with caplog.at_level(logging.INFO, "vit_jax"):
        ops = choose_ops(model, FakeMesh(platform, tensor)).ops
        choose_ops(model, FakeMesh(platform, tensor))
    assert len(caplog.messages) == 1
    assert all(word in caplog.messages[0] for word in words)
    assert ops.token_multiple == 1


@pytest.fixture(autouse=True)
def with_nothing_said():
    kernels._say_once.cache_clear()


@pytest.fixture
def cudnn_by_xla(monkeypatch):
    """The lengths of keys that cuDNN's attention is called with; XLA computes in its place.

    No interpreter runs cuDNN. It is called with arrays (B, N, H, K), N even.
    """
    called, attend = [], jax.nn.dot_product_attention

    def by_xla(q_BNHK, k_BMHK, v_BMHK, key_value_seq_lengths, implementation):
        called.append((q_BNHK.shape[1], key_value_seq_lengths is not None))
        assert (
            implementation == "cudnn" and q_BNHK.shape == k_BMHK.shape and q_BNHK.shape[1] % 2 == 0
        )
        return attend(q_BNHK, k_BMHK, v_BMHK, key_value_seq_lengths=key_value_seq_lengths)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    monkeypatch.setattr(kernels, "has_cuda", lambda: True)
    return called


@pytest.mark.parametrize(
    ("fields", "called"),
    [
        pytest.param({"pool": "gap"}, (10, True), marks=pytest.mark.slow),
        pytest.param({}, (10, False), marks=pytest.mark.slow),
        ({"registers": 3, "rotary": "indices", "qk_norm": True}, (14, True)),
        pytest.param(
            {"pool": "map", "parallel": True, "key_bias": False},
            (10, True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_model_computes_the_same_by_cudnn(fields, called, cudnn_by_xla):
    mesh = make_mesh(replica=1, data=2, fsdp=1, tensor=2, devices=jax.devices()[:4])
    model = small_model(depth=1, **fields).clone(constrain=constrain)
    by_cudnn = dataclasses.replace(model, dtype=jnp.bfloat16)
    by_cudnn = model.clone(ops=kernels.gpu_forms(by_cudnn, mesh)["cudnn"])
    expected, found = (loss_and_grads(each, mesh) for each in (model, by_cudnn))
    assert {*cudnn_by_xla} == {called}
    assert_same(found, expected)


@pytest.mark.parametrize("scan", [False, True])
def test_backward_passes_on_gpus_keep_no_norms_in_float32(scan):
    on_gpu = choose_ops(small_model(scan=scan), FakeMesh("gpu")).ops
    assert on_gpu.recompute_norms == scan
    images, wide = jax.ShapeDtypeStruct((2, 24, 24, 3), jnp.float32), (*(2,) * scan, 2, 10, 32)

    def kept(ops):
        model = small_model(dtype="bfloat16", scan=scan).clone(ops=ops)
        params = jax.eval_shape(model.init, jax.random.key(0), images)
        backward = jax.eval_shape(lambda *given: jax.vjp(model.apply, *given)[1], params, images)
        return [(x.shape, x.dtype) for x in jax.tree.leaves(backward)].count((wide, jnp.float32))

    assert kept(PLAIN) >= 2 and kept(dataclasses.replace(PLAIN, recompute_norms=True)) == 0


def test_a_gpu_without_bfloat16_computes_in_float32_without_kernel(caplog):
    mesh = FakeMesh("gpu", device_kind="Tesla T4", compute_capability="7.5")
    model = choose_ops(small_model(dtype="bfloat16"), mesh)
    assert model.dtype == jnp.float32 and not has_kernels(model)
    assert "compute capability 7.5" in caplog.messages[0]


@pytest.mark.parametrize("width", [64, 72, 80, 88, 104, 128])
def test_widths_of_published_heads_have_a_kernel(width, caplog):
    with caplog.at_level(logging.INFO, "vit_jax"):
        choose_ops(small_model(width=4 * width), FakeMesh("tpu"))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("axes", "fields"),
    [
        ({"fsdp": 2, "tensor": 2}, {"depth": 1}),
        *(
            pytest.param(axes, fields, marks=pytest.mark.slow)
            for axes, fields in (
                ({"fsdp": 2, "tensor": 2}, {"scan": True, "remat": "full"}),
                ({"fsdp": 2, "tensor": 2}, {"pool": "gap", "qkv_bias": False, "parallel": True}),
                ({"data": 2}, {"qk_norm": True, "pos_embed_at": "layers", "rotary": "indices"}),
            )
        ),
    ],
    ids=["unrolled", "scanned", "parallel", "normalised"],
)
def test_a_model_computes_the_same_by_kernels(axes, fields, interpreted_kernels):
    axes = {"replica": 1, "data": 1, "fsdp": 1, "tensor": 1} | axes
    mesh = make_mesh(**axes, devices=jax.devices()[: np.prod(list(axes.values()))])
    model = small_model(**fields).clone(constrain=constrain)
    expected = loss_and_grads(model, mesh)
    assert_same(loss_and_grads(model.clone(ops=fastest_on_tpu(model, mesh)), mesh), expected)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_kernel_takes_the_rows_and_heads_of_one_device(tensor, monkeypatch):
    """Also where each device, or each group of devices along fsdp, computes its own rows."""
    seen = []
    target = "vit_jax.devices.kernels.short_attention.attention"
    monkeypatch.setattr(target, lambda qkv, *args: seen.append(qkv[0].shape) or qkv[0])
    mesh = make_mesh(replica=1, data=2, fsdp=2, tensor=tensor, devices=jax.devices()[: 4 * tensor])
    kernel = fastest_on_tpu(small_model(), mesh).attention_kernel
    attend = lambda q_BNHK: kernel((q_BNHK,) * 3, (None,) * 3, None, None)  # noqa: E731
    of_devices, of_groups = (
        jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names)
        for spec, names in (
            (P(("data", "fsdp"), None, "tensor"), {*mesh.axis_names}),
            (P("data"), {"data"}),
        )
    )
    x_BNHK = np.arange(4 * 8 * 4 * 8, dtype=np.float32).reshape(4, 8, 4, 8)
    for compute in (attend, of_devices, jax.jit(of_groups)):
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(compute(x_BNHK), x_BNHK)
    assert seen == [(1, 8, 32 // tensor)] * 3


@pytest.mark.parametrize(
    ("own_rows", "layers"),
    [
        pytest.param(False, {}, marks=pytest.mark.slow),
        pytest.param(True, {}, marks=pytest.mark.slow),
        pytest.param(False, {"remat": "full", "scan": True}, marks=pytest.mark.slow),
        (True, {"remat": "full"}),
    ],
    ids=str,
)
def test_kernels_of_rows_compute_what_the_layers_do(
    own_rows, layers, interpreted_kernels, monkeypatch
):
    """With the masks of dropout and of stochastic depth, and the gradients, of the layers apart."""
    monkeypatch.setitem(kernels._VMEM_MIB, "cpu", 128)
    mesh = make_mesh(replica=1, data=2, fsdp=1, tensor=1, devices=jax.devices()[:2])
    fields = {"width": 128, "mlp_dim": 256, "depth": 1, "dtype": "bfloat16", "norm": "rms"}
    fields |= {"stochastic_depth": 0.4, "uniform_depth": True, "layer_scale": 0.5}
    model = small_model(**fields | layers, dropout=0.2)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(32, 24, 24, 3)), jnp.float32)
    params = jax.jit(model.init)(jax.random.key(0), images)
    params = jax.tree.map(lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    seen = {}

    def watch(module, name):
        compute = getattr(module, name)

        def watched(*args, **spec):
            seen[name] = args
            return compute(*args, **spec)

        monkeypatch.setattr(module, name, watched)

    watch(kernels.mlp, "mlp")
    watch(kernels.projections, "project")

    def loss_and_grads(model):
        def loss(params, images):
            rngs = {"dropout": jax.random.key(1)}
            return (model.apply(params, images, train=True, rngs=rngs) ** 2).sum()

        def own(params, images):
            return jax.tree.map(lambda x: x[None], jax.value_and_grad(loss)(params, images))

        if not own_rows:
            return jax.jit(jax.value_and_grad(loss))(params, images)
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
        return jax.jit(jax.shard_map(own, mesh=mesh, **specs))(params, images)

    ops = fastest_on_tpu(model, mesh)
    with jax.set_mesh(mesh):
        expected = loss_and_grads(model.clone(ops=dataclasses.replace(ops, rows=None)))
        assert not seen
        found = loss_and_grads(model.clone(ops=ops))
    assert seen.keys() == {"mlp", "project"} and all(x is not None for x in seen["mlp"][2])
    for x, reference, floor in pairs_with_floors(found, expected, 0.5, 0.75):
        size = max(np.linalg.norm(reference), floor)
        assert np.linalg.norm(x - reference) < 0.02 * size


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"gated_mlp": True}, ["projections", "mlp"]),
        ({"mlp_norm": True}, ["projections"]),
        ({"qk_norm": True}, ["mlp"]),
        ({"lora_rank": 2}, []),
        ({"parallel": True}, []),
        ({"remat": "full"}, ["projections", "mlp"]),
        ({"remat": "dots"}, []),
    ],
    ids=str,
)
def test_what_has_kernels_of_rows(fields, asked, monkeypatch):
    found = []
    for name in ("mlp", "projections"):
        find = lambda *_, name=name, **__: found.append(name)  # noqa: E731
        monkeypatch.setattr(kernels, f"_find_{name}_kernel", find)
    mesh = make_mesh(replica=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    model = small_model(**fields, depth=1)
    model = model.clone(ops=fastest_on_tpu(model, mesh))
    jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, 24, 24, 3)))
    assert found == asked


def test_plain_is_the_default_form():
    assert small_model().ops == PLAIN
