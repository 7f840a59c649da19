"""The flags of other libraries, and the keys that do the same here."""

from typing import NamedTuple


class Flag(NamedTuple):
    """A setting of other libraries.

    key: the key here; "data.ops=OP": the op that does it.
    timm, deit, mae, big_vision: its names there, without leading dashes, one after the other.
    note: how the values differ.
    """

    key: str
    timm: str = ""
    deit: str = ""
    mae: str = ""
    big_vision: str = ""
    note: str = ""

    @property
    def own_key(self) -> str:
        """The key without an op."""
        return self.key.partition("=")[0]


# Flags, mostly of timm, that are no key here: {what to do: its names there}.
WITHOUT_KEY = {
    "give --workdir=DIR; the same command goes on with a run":
        "output output_dir experiment resume start_epoch",
    "an evaluator has it: --config.evals.NAME.split, .every, .ops or .batch_size":
        "val_split val_interval interpolation validation_batch_size",
    "nothing to set: threads, memory layout, compilation and statistics over all devices are as "
    "the machine needs": "workers num_workers pin_mem channels_last torchcompile torchscript "
        "no_prefetcher sync_bn dist_bn local_rank device use_multi_epochs_loader",
    "not there": "mixup_off_epoch mixup_mode cutmix_minmax bce_target_thresh bce_sum drop_block "
        "jsd_loss aug_splits split_bn clip_mode lr_noise lr_cycle_mul lr_cycle_limit lr_k_decay",
}  # fmt: skip

LIBRARIES = {"timm": "timm", "deit": "DeiT", "mae": "MAE", "big_vision": "big_vision"}
# fmt: off
FLAGS = (
    Flag("duration", "epochs", "epochs", "epochs", "total_epochs total_steps",
         'with its unit: "300 epochs"'),
    Flag("global_batch_size", "batch_size", "batch_size", "batch_size", "input.batch_size",
         "of all devices; in timm, DeiT and MAE it is of one device"),
    Flag("optimizer.accum_steps", "grad_accum_steps", "", "accum_iter", "",
         "parts of the global batch, which stays as large"),
    Flag("seed", "seed", "seed", "seed", "seed"),
    Flag("init_from", "initial_checkpoint pretrained", "finetune", "finetune", "model_init",
         "a pickle (.pth, .pth.tar, .bin) is converted first: see weights.md"),
    Flag("model.name", "model", "model", "model", "model_name model.variant",
         "ViT-B/16 for vit_base_patch16_224"),
    Flag("model.stochastic_depth", "drop_path", "drop_path", "drop_path", "",
         "the rate of the last layer; it grows linearly from 0"),
    Flag("model.dropout", "drop", "drop", "", "model.dropout"),
    Flag("model.keep_tokens", "patch_drop_rate", "", "", "", "the share that is kept: 1 - rate"),
    Flag("model.pool", "gp", "", "global_pool cls_token", "model.pool_type",
         "token, gap or map"),
    Flag("model.remat", "grad_checkpointing", "", "", "model.remat_policy"),
    Flag("model.pos_embed", "", "", "", "model.posemb"),
    Flag("model.hidden_head", "", "", "", "model.rep_size"),
    Flag("model.head_bias", "", "", "", "init_head_bias"),
    Flag("model.dtype", "amp amp_dtype", "", "", "model.dtype_mm", "bfloat16; there is no scaler"),
    Flag("data.data_dir", "data_dir", "data_path", "data_path", "input.data.data_dir"),
    Flag("data.name", "dataset", "data_set", "", "input.data.name", "folder for class folders"),
    Flag("data.split", "train_split", "", "", "input.data.split"),
    Flag("data.num_classes", "num_classes", "", "nb_classes", "num_classes",
         "read from the data"),
    Flag("data.image_size", "img_size input_size", "input_size", "input_size", ""),
    Flag("data.channels", "in_chans", "", "", ""),
    Flag("data.mean", "mean", "", "", ""),
    Flag("data.std", "std", "", "", ""),
    Flag("data.ops", "aa hflip crop_pct scale ratio train_interpolation", "aa", "aa", "input.pp",
         "one text for crops, flips and augmentations, in their order; rand-m9-mstd0.5-inc1 is "
         "randaugment(2, 9, 0.5), with AugReg's operations"),
    Flag("data.ops=mixup", "mixup mixup_prob", "mixup mixup_prob", "mixup", "mixup.p",
         "mixup(alpha) in data.ops"),
    Flag("data.ops=cutmix", "cutmix", "cutmix", "cutmix", "", "cutmix(alpha) in data.ops"),
    Flag("data.ops=mixup_or_cutmix", "mixup_switch_prob", "mixup_switch_prob",
         "mixup_switch_prob", "", "for each pair one of both, with equal probability"),
    Flag("data.ops=erase", "reprob remode recount", "reprob remode recount",
         "reprob remode recount", "", "erase(probability, area_max=0.333) in data.ops, always with "
         "uniform noise; repeat the op for more rectangles"),
    Flag("data.ops=color_jitter", "color_jitter", "color_jitter", "color_jitter", "",
         "color_jitter(1, 0.4, 0.4, 0.4, 0) in data.ops for 0.4; timm leaves it out if aa is set"),
    Flag("data.ops=vertical_flip", "vflip", "", "", "", "vertical_flip in data.ops flips half "
         "of the images"),
    Flag("data.ops=blur", "gaussian_blur_prob", "", "", ""),
    Flag("data.ops=greyscale", "grayscale_prob", "", "", ""),
    Flag("data.ops=three_augment", "", "ThreeAugment", "", ""),
    Flag("data.repeats", "aug_repeats", "repeated_aug", "", ""),
    Flag("loss.name", "bce_loss", "bce_loss", "", "loss", "sigmoid for binary cross-entropy"),
    Flag("loss.label_smoothing", "smoothing", "smoothing", "smoothing", ""),
    Flag("optimizer.name", "opt", "opt", "", "optax_name"),
    Flag("optimizer.peak_lr", "lr lr_base", "lr", "lr blr", "lr",
         "for the whole batch; MAE's blr and timm's lr_base count 256 images: lr = blr * batch / "
         "256 (in timm, for Adam, LAMB and the like, the square root of batch / 256)"),
    Flag("optimizer.weight_decay", "weight_decay", "weight_decay", "weight_decay", "wd",
         "as in timm, DeiT and MAE; it is big_vision's wd divided by its lr"),
    Flag("optimizer.grad_clip_norm", "clip_grad", "clip_grad", "clip_grad", "grad_clip_norm"),
    Flag("optimizer.layer_decay", "layer_decay", "", "layer_decay", ""),
    Flag("optimizer.eps", "opt_eps", "opt_eps", "", ""),
    Flag("optimizer.b2", "opt_betas", "opt_betas", "", "", "b1 and b2, a key for each"),
    Flag("optimizer.momentum", "momentum", "momentum", "", ""),
    Flag("optimizer.ema_decay", "model_ema model_ema_decay model_ema_warmup",
         "model_ema model_ema_decay", "", "", "smaller in the first steps"),
    Flag("schedule.name", "sched", "sched", "", "schedule"),
    Flag("schedule.warmup", "warmup_epochs warmup_lr", "warmup_epochs warmup_lr",
         "warmup_epochs", "warmup_steps warmup_epochs",
         'with its unit: "5 epochs"; it rises from 0'),
    Flag("schedule.cooldown", "cooldown_epochs", "cooldown_epochs", "", "cooldown_steps",
         "falls to 0 at the end; timm's keeps the smallest rate"),
    Flag("schedule.end_share", "min_lr", "min_lr", "min_lr", "", "a share of peak_lr"),
    Flag("schedule.milestones", "decay_milestones", "", "", ""),
    Flag("objective.teacher", "", "teacher_model teacher_path", "", "teachers"),
    Flag("objective.temperature", "", "distillation_tau", "", ""),
    Flag("objective.weight", "", "distillation_alpha", "", ""),
    Flag("objective.mask_ratio", "", "", "mask_ratio", ""),
    Flag("objective.norm_pixels", "", "", "norm_pix_loss", ""),
    Flag("mesh.fsdp", "", "", "", "fsdp sharding_strategy"),
    Flag("checkpoint.every", "recovery_interval", "", "", "ckpt_steps",
         'with its unit: "1000 steps"'),
    Flag("checkpoint.keep_last", "checkpoint_hist", "", "", ""),
    Flag("checkpoint.keep_every", "", "", "", "keep_ckpt_steps"),
    Flag("checkpoint.keep_best", "eval_metric", "", "", "", "NAME/METRIC of an evaluator"),
    Flag("log.every", "log_interval", "", "", "log_training_steps", "with its unit"),
    Flag("log.wandb", "log_wandb", "", "", "", "a project's name"),
)
# fmt: on


def say_without_key(word: str) -> str:
    """What to do with a flag of another library that is no key here; "" if it is none of them."""
    word = word.lower().replace("-", "_")
    return next((say for say, names in WITHOUT_KEY.items() if word in names.split()), "")


def flags_named(word: str) -> list[Flag]:
    """The settings that another library calls `word`: `drop_path`, `warmup-epochs`, `wd`.

    The last part of a dotted name counts too, and a policy of timm such as `rand-m9-mstd0.5` is
    one of `aa`.
    """
    word = word.lower().replace("-", "_")
    word = "aa" if word.startswith("rand_m") else word
    names = {flag: " ".join(flag[1:5]).lower().split() for flag in FLAGS}
    return [flag for flag, those in names.items()
            if any(word in (name, name.rpartition(".")[2]) for name in those)]  # fmt: skip
