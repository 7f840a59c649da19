"""Faults of a config that are found before files or devices are touched."""

import re

import pytest
from ml_collections import ConfigDict

import vit_jax.config
from vit_jax import models
from vit_jax.config import base_config, classification, fewshot
from vit_jax.config.evals import EVALUATORS
from vit_jax.config.stored import from_json, to_json
from vit_jax.config.text import apply_overrides
from vit_jax.errors import InputError
from vit_jax.run.validation import find_faults, validate


@pytest.fixture
def config():
    c = base_config()
    c.global_batch_size, c.duration = 64, "10 epochs"
    c.model.name, c.data.name, c.data.image_size = "ViT-mu/4", "digits", 8
    c.optimizer.peak_lr = 1e-3
    c.evals.test = classification(split="test", every="1 epochs")
    c.evals.few = fewshot(train_split="train", test_split="test", every="1 epochs")
    return c


def test_valid_config(config):
    assert find_faults(config) == []
    validate(config, [], "--config=mine.py")
    assert find_faults(from_json(to_json(config))) == []


# (overrides, start of the fault, its requirement or remedy)
FAULTS = [
    # required keys
    ({"global_batch_size": "None"}, "global_batch_size: not set", "--config.global_batch_size="),
    ({"duration": "None"}, "duration: not set", "--config.duration="),
    ({"model.name": "None"}, "model.name: not set", "--config.model.name="),
    ({"data.name": "None"}, "data.name: not set", "--config.data.name="),
    ({"data.image_size": "None"}, "data.image_size: not set", "--config.data.image_size="),
    ({"optimizer.peak_lr": "None"}, "optimizer.peak_lr: not set", "--config.optimizer.peak_lr="),
    # durations
    ({"duration": "90"}, "duration='90': not a duration", '"90 epochs"'),
    ({"duration": "9 epoch s"}, "duration='9 epoch s': not a", '"90 epochs"'),
    ({"duration": "-1 steps"}, "duration='-1 steps':", "write a number"),
    ({"schedule.warmup": "5 eopchs"}, "schedule.warmup='5 eopchs'", "did you mean epochs?"),
    ({"schedule.cooldown": "x"}, "schedule.cooldown='x'", '"90 epochs"'),
    ({"schedule.timescale": "x"}, "schedule.timescale='x'", '"90 epochs"'),
    ({"checkpoint.every": "hourly"}, "checkpoint.every='hourly'", '"90 epochs"'),
    ({"checkpoint.keep_every": "all"}, "checkpoint.keep_every='all'", '"90 epochs"'),
    ({"log.every": "5 s"}, "log.every='5 s'", "steps, epochs, examples"),
    ({"evals.test.every": "often"}, "evals.test.every='often'", '"90 epochs"'),
    ({"duration": "0 steps"}, "duration='0 steps':", "more than 0"),
    ({"log.every": "0 epochs"}, "log.every='0 epochs':", "more than 0"),
    ({"checkpoint.keep_every": "0 steps"}, "checkpoint.keep_every='0 steps':", "more than 0"),
    (
        {"data.ops": "mixup(0.2)", "global_batch_size": "63"},
        "global_batch_size=63: data.ops mixes",
        "a multiple of 2; try 62",
    ),
    (
        {"data.ops": "cutmix(1.0)", "global_batch_size": "63", "data.repeats": "3"},
        "global_batch_size=63: data.ops mixes",
        "a multiple of 6, 2 x data.repeats=3; try 60",
    ),
    (
        {"data.ops": "mixup(0.2)", "data.order": "chunk", "data.streams": "1", "data.repeats": "4"},
        "data.streams=1: data.ops mixes",
        "an even number that divides the 16 records of a batch",
    ),
    (
        {"data.ops": "mixup(0.2)", "data.order": "chunk", "global_batch_size": "12"},
        "data.streams=1: data.ops mixes",
        "try 2",
    ),
    ({"data.ops": "mixup(0.2)|cutmix(1.0)"}, "data.ops: mixup(0.2) and cutmix(1.0)", "keep one"),
    # counts
    ({"seed": "-1"}, "seed=-1:", "from 0 to 4294967295"),
    ({"seed": "4294967296"}, "seed=4294967296:", "from 0 to 4294967295"),
    ({"global_batch_size": "0"}, "global_batch_size=0:", "needs a positive number"),
    ({"global_batch_size": "1" + 20 * "0"}, "global_batch_size=1", "up to 16,777,216"),
    ({"evals.test.batch_size": "1" + 20 * "0"}, "evals.test.batch_size=1", "up to 16,777,216"),
    ({"data.num_classes": "0"}, "data.num_classes=0:", "needs a positive number"),
    ({"data.num_examples": "-5"}, "data.num_examples=-5:", "needs a positive number"),
    ({"evals.test.batch_size": "0"}, "evals.test.batch_size=0:", "needs a positive number"),
    # sizes
    ({"data.image_size": "0"}, "data.image_size=0:", "needs a positive int or a pair"),
    ({"data.image_size": "8,8,3"}, "data.image_size=(8, 8, 3):", "needs a positive int or a pair"),
    ({"data.image_size": "8.5"}, "data.image_size=8.5:", "needs a positive int or a pair"),
    ({"model.patch_size": "0"}, "model.patch_size=0:", "needs a positive int or a pair"),
    ({"model.patch_size": "4,-4"}, "model.patch_size=(4, -4):", "needs a positive int or a pair"),
    # the model
    ({"model.name": "ViT"}, "model.name='ViT'", "ViT-"),
    ({"model.name": "ResNet-50"}, "model.name='ResNet-50': no such model", "known: ViT-mu/16"),
    ({"model.name": "ViT-Q/16"}, "model.name='ViT-Q/16': no variant 'Q'", "known: mu, Ti"),
    ({"model.name": "ViT-B16"}, "model.name='ViT-B16'", "needs ViT-VARIANT/PATCH"),
    ({"model.name": "ViT-mu/5"}, "model.patch_size=(5, 5): 5 does not divide", "height 5 or 10"),
    ({"model.patch_size": "4,3"}, "model.patch_size=(4, 3): 3 does not divide", "width 6 or 9"),
    ({"model.name": "ViT-mu/16"}, "model.patch_size=(16, 16): 16 does not divide", "height 16"),
    ({"model.num_heads": "3"}, "model.num_heads=3 does not divide width=32", "choose one"),
    ({"model.width": "0"}, "model.width=0:", "needs a positive int"),
    ({"model.depth": "-1"}, "model.depth=-1:", "needs a positive int"),
    ({"model.mlp_dim": "0"}, "model.mlp_dim=0:", "needs a positive int"),
    ({"model.num_heads": "0"}, "model.num_heads=0:", "needs a positive int"),
    ({"model.pool": "tokens"}, "model.pool='tokens':", "did you mean token?"),
    ({"model.pos_embed": "sincos"}, "model.pos_embed='sincos':", "did you mean sincos_2d?"),
    ({"model.gelu": "fast"}, "model.gelu='fast':", "known: tanh, exact"),
    ({"model.remat": "everything"}, "model.remat='everything':", "known: none, dots, full"),
    ({"model.remat_layers": "1"}, "model.remat_layers=1: model.remat=None", "remat=full"),
    ({"model.remat_layers": "9", "model.remat": "full"}, "model.remat_layers=9:", "0 to depth="),
    (
        {"model.remat_layers": "1", "model.remat": "dots", "model.scan": "true"},
        "model.remat_layers=1: a scan",
        "model.scan=false",
    ),
    ({"model.dtype": "float16"}, "model.dtype='float16':", "known: float32, bfloat16"),
    ({"model.dropout": "1"}, "model.dropout=1.0:", "needs a rate in [0, 1)"),
    ({"model.attention_dropout": "-0.1"}, "model.attention_dropout=-0.1:", "needs a rate"),
    ({"model.stochastic_depth": "2"}, "model.stochastic_depth=2.0:", "needs a rate"),
    # the data
    ({"data.mean": "0.5,0.5"}, "data.mean=(0.5, 0.5):", "needs three numbers"),
    ({"data.std": "1,1,1,1"}, "data.std=(1, 1, 1, 1):", "needs three numbers"),
    ({"data.std": "0,1,1"}, "data.std=(0, 1, 1):", "needs numbers above 0"),
    ({"data.std": "-1,1,1"}, "data.std=(-1, 1, 1):", "needs numbers above 0"),
    (
        {"data.channels": "1", "data.num_global": "2", "data.global_ops": "greyscale(0.2)"},
        "data.channels=1: greyscale needs three channels",
        "leave it out of data.global_ops",
    ),
    ({"data.ops": "decode|flop"}, "data.ops: unknown op 'flop'", "did you mean 'flip'?"),
    ({"data.ops": "flip|decode"}, "data.ops: 'decode' runs on the host", "'decode|flip'"),
    ({"data.ops": "resize(x)"}, "data.ops: 'resize(x)' is not an op", "such as resize(72"),
    ({"data.ops": "pad_crop"}, "data.ops: 'pad_crop': missing", "usage: pad_crop(padding)"),
    ({"evals.test.ops": "rezise"}, "evals.test.ops: unknown op", "did you mean 'resize'?"),
    ({"evals.test.ops": "flip"}, "evals.test.ops='flip': flip ", "leave it out"),
    ({"evals.test.type": "fewshots"}, "evals.test.type='fewshots':", "did you mean fewshot?"),
    ({"evals.few.every": "often"}, "evals.few.every='often'", '"90 epochs"'),
    ({"evals.few.ops": "flip"}, "evals.few.ops='flip': flip ", "leave it out"),
    ({"evals.few.shots": "0,"}, "evals.few.shots=(0,): needs positive ints", "1,5,10,25"),
    ({"evals.few.l2": "-1,"}, "evals.few.l2=(-1,): needs positive numbers", "1024,"),
    ({"evals.few.num_draws": "0"}, "evals.few.num_draws=0: needs a positive int", "int"),
    # loss and optimizer
    ({"objective.name": "supervized"}, "objective.name='supervized':", "did you mean supervised?"),
    ({"loss.name": "softmx"}, "loss.name='softmx':", "did you mean softmax?"),
    ({"loss.label_smoothing": "1"}, "loss.label_smoothing=1.0:", "needs a number in [0, 1)"),
    ({"loss.z_loss": "-1"}, "loss.z_loss=-1.0:", "at least 0"),
    ({"loss.name": "sigmoid", "loss.z_loss": "1e-4"}, "loss.z_loss=0.0001:", "softmax"),
    ({"model.layer_scale": "0"}, "model.layer_scale=0.0:", "needs a positive number, or None"),
    ({"optimizer.name": "adam"}, "optimizer.name='adam'", "did you mean adamw?"),
    ({"optimizer.name": "sgd", "optimizer.b1": "0.9"}, "optimizer.b1=0.9", "sgd has no such"),
    ({"optimizer.momentum_dtype": "half"}, "optimizer.momentum_dtype='half'", "bfloat16"),
    ({"optimizer.layer_decay": "2"}, "optimizer.layer_decay=2.0", "at most 1"),
    ({"optimizer.freeze": "("}, "optimizer.freeze='('", "regular expression"),
    ({"optimizer.accum_steps": "0"}, "optimizer.accum_steps=0:", "needs a positive number"),
    ({"optimizer.accum_steps": "7"}, "optimizer.accum_steps=7:", "divide global_batch_size=64"),
    ({"optimizer.ema_decay": "1"}, "optimizer.ema_decay=1.0:", "between 0 and 1, or None"),
    ({"optimizer.weight_decay": "-1"}, "optimizer.weight_decay=-1.0", "must be at least 0"),
    ({"optimizer.b1": "1"}, "optimizer.b1=1.0", "at least 0 and less than 1"),
    ({"optimizer.momentum": "-1"}, "optimizer.momentum=-1.0", "at least 0 and less than 1"),
    ({"optimizer.grad_clip_norm": "0"}, "optimizer.grad_clip_norm=0.0", "None turns it off"),
    ({"optimizer.weight_decay_on": "("}, "optimizer.weight_decay_on='('", "regular expression"),
    ({"optimizer.peak_lr": "-1"}, "optimizer.peak_lr=-1.0", "must be at least 0"),
    ({"schedule.name": "cosin"}, "schedule.name='cosin'", "did you mean cosine?"),
    ({"optimizer.peak_lr": "inf"}, "optimizer.peak_lr=inf:", "needs a finite number"),
    ({"optimizer.weight_decay": "nan"}, "optimizer.weight_decay=nan:", "needs a finite number"),
    ({"optimizer.eps": "nan"}, "optimizer.eps=nan:", "needs a finite number"),
    ({"data.std": "1,1,1e999"}, "data.std=(1, 1, inf):", "needs a finite number"),
    ({"optimizer.peak_lr": "1e99"}, "optimizer.peak_lr=1e+99:", "up to 3.4e+38"),
    ({"model.depth": "1" + 20 * "0"}, "model.depth=1", "finite number, up to 1.1e+12"),
    # data
    ({"data.order": "chunks"}, "data.order='chunks':", "did you mean chunk?"),
    ({"data.chunk_size": "0"}, "data.chunk_size=0:", "needs a positive number"),
    ({"data.repeats": "3"}, "data.repeats=3:", "must divide global_batch_size=64"),
    ({"data.repeats": "0"}, "data.repeats=0:", "needs a positive number"),
    ({"data.streams": "12"}, "data.streams=12:", "divide the 64 records of a batch"),
    (
        {"data.order": "record", "data.streams": "8"},
        "data.streams=8: data.order='record' has no streams",
        "set data.order=chunk",
    ),
    ({"data.reader": "offset"}, "data.reader='offset':", "did you mean offsets?"),
    ({"data.mix": "digits"}, "data.mix: 'digits' is not an entry", "NAME@SPLIT=WEIGHT"),
    ({"data.max_corrupt_fraction": "2"}, "data.max_corrupt_fraction=2.0:", "from 0 to 1"),
    # mesh and checkpoints
    ({"mesh.platform": "cuda"}, "mesh.platform='cuda':", "known: cpu, gpu, tpu"),
    ({"checkpoint.keep_last": "1"}, "checkpoint.keep_last=1:", "at least 2"),
    ({"log.wandb": "a/b"}, "log.wandb='a/b':", r"without any of /\#?%:"),
    ({"log.wandb": "a:b"}, "log.wandb='a:b':", "needs the name of a project"),
    ({"log.wandb": " "}, "log.wandb=' ':", "needs the name of a project"),
    ({"log.wandb": "a" * 129}, "log.wandb='aaa", "at most 128 characters"),
    ({"job.heartbeat_s": "0"}, "job.heartbeat_s=0:", "a positive number"),
    ({"job.save_deadline_s": "-1"}, "job.save_deadline_s=-1.0:", "a positive number"),
    (
        {"job.step_deadline_s": "60", "job.heartbeat_s": "60"},
        "job.step_deadline_s=60.0: must be at most 0.75 * job.heartbeat_s=60",
        "without saying why",
    ),
    ({"log.profile": "5"}, "log.profile='5':", "needs two steps, the smaller first, e.g. 10:15"),
]


@pytest.mark.parametrize(("overrides", "begins", "says"), FAULTS, ids=lambda x: str(x)[:40])
def test_fault(config, overrides, begins, says):
    assert apply_overrides(config, list(overrides.items())) == []
    (fault,) = find_faults(config)
    assert fault.startswith(begins)
    assert says in fault


@pytest.mark.parametrize("order", ["None", "record", "chunk"])
def test_pairs_are_needed_where_images_are_mixed_alone(config, order):
    odd = {"global_batch_size": "63", "data.ops": "flip", "data.order": order}
    assert apply_overrides(config, list(odd.items())) == []
    assert find_faults(config) == []
    config.global_batch_size, config.data.ops = 64, "mixup(0.2)"
    assert find_faults(config) == []


def test_streams_may_be_given_before_the_order_is_known(config):
    config.data.streams = 8
    assert find_faults(config) == []


@pytest.mark.parametrize(
    ("key", "example"), [("seed", 0), ("optimizer.weight_decay", 0.0), ("data.ops", "''")]
)
def test_config_file_that_empties_a_key(config, key, example):
    parents, _, leaf = key.rpartition(".")
    (config[parents] if parents else config)[leaf] = None
    assert find_faults(config) == [f"{key}=None: needs a value, e.g. {example}"]


def test_several_faults_are_all_listed(config):
    overrides = {
        "duration": "90",
        "global_batch_size": "-8",
        "model.name": "ViT-Q/16",
        "data.ops": "flop",
        "data.mean": "1,2",
        "evals.test.ops": "flip",
        "loss.name": "x",
        "optimizer.name": "x",
        "schedule.name": "x",
        "mesh.platform": "x",
        "checkpoint.keep_last": "0",
        "log.profile": "x",
    }
    assert apply_overrides(config, list(overrides.items())) == []
    config.data.name = None
    faults = find_faults(config)
    named = {key: [fault for fault in faults if fault.startswith(key)] for key in overrides}
    assert {key: len(found) for key, found in named.items()} == dict.fromkeys(overrides, 1)
    assert faults[0].startswith("data.name: not set")
    assert len(faults) == len(overrides) + 1


def test_faults_do_not_hide_behind_a_missing_size(config):
    config.data.image_size = None
    config.data.ops = "flop"
    sizes, ops = find_faults(config)
    assert sizes.startswith("data.image_size: not set") and ops.startswith("data.ops: ")


def test_faults_of_overrides_and_of_the_config_in_one_error(config):
    overrides = [("model.wdth", "3"), ("seed", "x"), ("loss.name", "x"), ("mesh.platform", "x")]
    with pytest.raises(InputError) as e:
        validate(config, apply_overrides(config, overrides), "--config=mine.py")
    assert str(e.value).splitlines() == [
        "--config=mine.py: 4 faults",
        "  --config.model.wdth: no such key; did you mean model.width?",
        "  --config.seed='x': needs an int",
        "  loss.name='x': known: softmax, sigmoid",
        "  mesh.platform='x': known: cpu, gpu, tpu",
    ]


def test_field_that_the_family_lacks(config, monkeypatch):
    """ViT has every key of base_config(), so a family with fewer keys is used."""

    def fewer(num_classes, image_size, patch_size, width, dropout, dtype):
        raise AssertionError("only its signature counts")

    monkeypatch.setitem(models.MODELS, "ViT", models.Family(fewer, fewer, ()))
    config.model.dropout = 0.1
    config.model.head_bias, config.model.hidden_head = -10.0, True
    head_bias, hidden_head = sorted(find_faults(config))
    assert head_bias.startswith("model.head_bias: fewer has no such field")
    assert hidden_head.startswith("model.hidden_head: fewer has no such field")
    config.model.head_bias = config.model.hidden_head = None
    monkeypatch.undo()
    assert find_faults(config) == []


def test_every_field_of_config_is_one_of_some_family():
    fields = set(base_config().model) - {"name", "kernels"}
    known = set()
    for family in models.MODELS.values():
        known |= set(family.module.__dataclass_fields__)
    assert fields <= known


@pytest.mark.parametrize("name", ["train", "time", "a/b"])
def test_names_that_an_evaluator_cannot_have(config, name):
    config.evals[name] = classification(split="test", every="1 epochs")
    (fault,) = find_faults(config)
    assert fault.startswith(f"evals.{name}: choose a name")


@pytest.mark.parametrize("kind", EVALUATORS)
def test_an_evaluator_s_helper_makes_its_entries(kind):
    make, keys = getattr(vit_jax.config, kind), EVALUATORS.find(kind).declared()
    required = {k: "1 epochs" for k, declared in keys.items() if declared.default is ...}
    entry = make(**required)
    assert entry.type == kind
    assert set(entry) == {"type", *keys}
    with pytest.raises(InputError) as error:
        make(evry="1 epochs", **(required | {"every": 3}))
    assert [re.split("[:=]", fault)[0] for fault in error.value.faults] == ["evry", "every"]
    with pytest.raises(InputError) as error:
        make()
    assert [fault.partition(":")[0] for fault in error.value.faults] == [*required]


def test_config_that_is_not_born_from_base_config(config):
    assert "model.name: missing; start from base_config()" in find_faults(ConfigDict({"seed": 0}))
    config.evals.own = ConfigDict({"type": "classification", "split": "test", "evry": "1 epochs"})
    faults = find_faults(config)
    assert [fault.split(":")[0] for fault in faults] == [
        f"evals.own.{key}"
        for key in ("batch_size", "data_dir", "data_name", "every", "evry", "ops")
    ]
    assert all("make entries with config.classification()" in fault for fault in faults)
