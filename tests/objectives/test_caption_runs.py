"""Whole runs with captions as a target: devices, restarts, and captions that a run writes."""

import json

import asked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finished_run import check_same_end, final_state
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from PIL import Image

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.config.text import load_config
from vit_jax.main import main
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import with_known
from vit_jax.objectives.contract import RunFacts
from vit_jax.run import loop

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("debug", {"mesh.tensor": 2, "mesh.fsdp": 2, "objective.parallel_share": 1}),
        pytest.param(
            "debug,pairs",
            {"mesh.fsdp": 2, "model.keep_tokens": 0.5, "model.scan": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_on_8_devices_equals_one_on_one(one_device, tmp_path, words, keys):
    form = f"configs/captions.py:{words}"
    started, state, batch = asked.prepare_step(form, keys, one_device, tmp_path)
    e, part = started.experiment, started.settings.objective
    with jax.set_mesh(started.mesh):

        def compute(objective, state):
            of = lambda p: objective.loss(p, state, batch, None, jax.random.key(0)).loss  # noqa: E731
            return of, state.params

        of, params = compute(e.objective, state)
        found, grads = jax.jit(jax.value_and_grad(of))(params)
    decoder = state.params["objective"]["decoder"]
    assert decoder["token_embedding"]["embedding"].sharding.spec == P(None, "fsdp")
    assert decoder["head"]["kernel"].sharding.spec == P("fsdp")
    plain = with_known(e.model, constrain=unconstrained, ops=PLAIN)
    facts = RunFacts((), (), text=started.train_source.tokenizer.facts)
    state, batch = jax.device_get((state.replace(opt_state={}), batch))
    of, params = compute(part.bind(plain, None, facts), state)
    expected, expected_grads = jax.jit(jax.value_and_grad(of))(params)
    assert float(found) == pytest.approx(float(expected), rel=5e-6)
    both = [ravel_pytree(jax.device_get(each))[0] for each in (grads, expected_grads)]
    assert jnp.linalg.norm(both[0] - both[1]) < 1e-5 * jnp.linalg.norm(both[1])


SHORT = {"duration": "8 steps", "optimizer.ema_decay": 0.9, "model.scan": True,
         "model.remat": "full", "evals": {}}  # fmt: skip


def train(workdir, until=None, **changes):
    """8 steps of `captions:debug,pairs`; `until`: saved and stopped after that step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.PreemptionGuard, "should_stop", lambda self, step: step == until)
        try:
            vit_jax.train("captions:debug,pairs", workdir, SHORT | changes)
        except loop.Preempted:
            assert until is not None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "captions"
    train(workdir)
    return workdir


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_bits(run, tmp_path):
    train(tmp_path / "broken", until=5)
    train(tmp_path / "broken")
    check_same_end(tmp_path / "broken", run)


@pytest.mark.slow
def test_a_run_begins_with_the_decoder_of_another(run, tmp_path, caplog):
    for depth in (1, 2):
        config = load_config("captions:debug,pairs")
        config.init_from, config.model.scan, config.objective.decoder_depth = str(run), False, depth
        first = asked.prepare(config, tmp_path / str(depth)).initial_params
        found = {n: x for n, x in first.items() if n.startswith("objective/decoder/")}
        side = vit_jax.read_pretrained(run).read_caption_side()
        assert len(found) == (len(side.params) if depth == 1 else 0)
        for name, array in found.items():
            np.testing.assert_array_equal(array, side.params[name.partition("decoder/")[2]])
        assert [n for n in first if n.startswith("objective/text/")]
    assert "its decoder has another depth, so the decoder starts anew" in caplog.text


@pytest.mark.slow
def test_a_run_writes_captions_and_searches(run, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    words = ["predict", f"--workdir={run}", "--captions", "--batch_size=8", str(tmp_path)]
    assert main([*words, "--beams=3", "--top=2", "--format=json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(row.get("captions", ())) for row in rows] == [2, 2, 2, 0]
    assert rows[3]["error"].startswith("not a readable image")
    for row in rows[:3]:
        first, second = row["captions"]
        assert first["log_probability"] >= second["log_probability"]
    found = vit_jax.predict(tmp_path, run, output="captions", beams=3, top=2)
    assert [row.get("captions") for row in found] == [row.get("captions") for row in rows]
    greedy = vit_jax.predict(tmp_path / "1.png", run, output="captions")
    assert len(greedy[0]["captions"]) == 1
    raw = vit_jax.read_pretrained(run, averaged=False)
    assert vit_jax.predict(tmp_path / "1.png", raw, output="captions") != greedy
    assert len(vit_jax.search(tmp_path, run, texts="noise 3")[0]["neighbours"]) == 3


@pytest.mark.slow
def test_a_run_with_captions_only_has_no_text_tower(tmp_path):
    changes = {"objective.contrastive_weight": 0}
    train(tmp_path / "run", **changes)
    with pytest.raises(InputError, match="the model has no text tower"):
        vit_jax.search(tmp_path, tmp_path / "run", texts="noise 3")
    state = final_state(tmp_path / "run")[1]
    own = {name.split("/")[2] for name in state if name.startswith("params/objective/")}
    assert own == {"decoder"}
