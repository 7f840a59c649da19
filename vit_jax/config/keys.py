"""The keys of a config, with their types, their defaults and their meaning.

Each function adds one section. A key that is None is either required (`base.REQUIRED`) or optional;
the comment of an optional key says what None means. Durations are strings with a unit: "90 epochs",
"10000 steps", "5e6 examples".
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def add_keys(c: ConfigDict) -> None:
    """Add every key but `evals` to an empty config. The reference lists them in this order."""
    _add_run(c)
    _add_model(c)
    _add_data(c)
    _add_objective(c)
    _add_self_distillation(c)
    _add_loss(c)
    _add_optimizer(c)
    _add_schedule(c)
    _add_layout(c)
    _add_checkpoint(c)
    _add_stop(c)
    _add_log(c)
    _add_job(c)
    _add_study(c)


def _add_run(c: ConfigDict) -> None:
    """Keys of the whole run."""
    c.seed = 0  # of the data order, the initial weights, augmentation and dropout
    c.global_batch_size = placeholder(int)  # over all hosts and devices
    c.duration = placeholder(str)  # "90 epochs", "10000 steps" or "5e6 examples"
    # Initial weights: a workdir, file, address or name, as transfer.read_pretrained takes. None or
    # "scratch": random weights; "": must be set by the user.
    c.init_from = placeholder(str)
    c.init_head = "new"  # or kept: keep the head of init_from instead of a new one
    c.init_resize = placeholder(str)  # how to resample positions; None: as init_from's library
    # source: init_from gives the image size and the model's fields where these are None, and the
    # value range (data.mean, data.std) where it has its default.
    c.init_fields = "config"
    c.plugins = ()  # the user's own modules, imported before other keys are read; see plugins.py


def _add_model(c: ConfigDict) -> None:
    """The model; see `models.create_model`."""
    c.model = ConfigDict()  # for all keys after `dtype`, None means the default of the model family
    c.model.name = placeholder(str)  # such as ViT-B/16, BiT-R50x1 or EfficientNet-B0
    # auto: attention, biases and products in the fastest form on the mesh's devices; plain: by XLA
    c.model.kernels = "auto"
    c.model.dtype = "float32"  # for computations; parameters are always float32
    c.model.patch_size = placeholder(object)  # int or (height, width); None: taken from the name
    c.model.stages = placeholder(tuple)  # ResNet: units per stage
    c.model.stem_width = placeholder(int)  # ResNet: channels of the root
    c.model.width_factor = placeholder(float)  # EfficientNet: channels / those of B0
    c.model.depth_factor = placeholder(float)  # EfficientNet: blocks / those of B0
    c.model.width = placeholder(int)  # of a token
    c.model.depth = placeholder(int)  # number of layers
    c.model.mlp_dim = placeholder(int)  # width of the hidden layer of each MLP
    c.model.token_module = placeholder(str)  # T2T-ViT: performer or transformer
    c.model.token_width = placeholder(int)  # T2T-ViT: width of its tokens
    c.model.num_heads = placeholder(int)  # heads of attention in each layer
    c.model.pool = placeholder(str)  # token, gap or map
    c.model.class_token = placeholder(bool)  # None: if `pool` needs one
    c.model.norm_pooled = placeholder(bool)  # final norm after pooling instead of before
    c.model.hidden_head = placeholder(bool)  # a hidden layer before the last linear layer
    c.model.head_bias = placeholder(float)  # initial bias of the last linear layer
    c.model.head_batch_norm = placeholder(bool)  # normalise the head's input over the batch
    c.model.distillation_head = placeholder(bool)  # DeiT: False leaves out the second head
    # none, learned_1d, learned_2d, relative or sincos_2d; T2T-ViT: sincos_1d too
    c.model.pos_embed = placeholder(str)
    c.model.pos_embed_at = placeholder(str)  # stem, layers or layers_shared; None: set by pos_embed
    c.model.pos_embed_class_token = placeholder(bool)  # False: only patches have positions
    c.model.gelu = placeholder(str)  # tanh or exact
    c.model.dropout = placeholder(float)  # rate, rounded to 1/256
    c.model.attention_dropout = placeholder(float)  # rate of dropout on attention weights
    c.model.parallel = placeholder(bool)  # attention and MLP in parallel
    c.model.norm = placeholder(str)  # layer or rms
    c.model.norm_eps = placeholder(float)  # epsilon of the norms
    c.model.norm_momentum = placeholder(float)  # EfficientNet: of the running batch statistics
    c.model.qk_norm = placeholder(bool)  # norms of queries and keys
    c.model.qkv_bias = placeholder(bool)  # biases of the projections to queries, keys and values
    c.model.layer_scale = placeholder(float)  # initial value of a learned scale of each branch
    c.model.lora_rank = placeholder(int)  # rank of the LoRA adapters on query and value; None: none
    c.model.stochastic_depth = placeholder(float)  # rate in the last layer; grows linearly from 0
    c.model.scan = placeholder(bool)  # one scan over the layers, which compiles faster
    c.model.remat = placeholder(str)  # none, dots or full: what the backward pass recomputes
    c.model.remat_layers = placeholder(int)  # it does so in the first so many layers; None: in all


def _add_data(c: ConfigDict) -> None:
    """The training data and what a batch holds of it."""
    c.data = ConfigDict()
    c.data.name = placeholder(str)  # digits, folder, synthetic, vtab/TASK, or a TFDS data set
    c.data.split = "train"  # training split; TFDS also takes a slice, train[:90%]
    c.data.data_dir = placeholder(str)  # None: TFDS's default folder
    c.data.exif = True  # turn your own pictures by their EXIF orientation
    c.data.image_size = placeholder(object)  # int or (height, width), in pixels
    c.data.channels = 3  # of the model's images: 1 is grey, 4 as in RGBA files
    c.data.num_classes = placeholder(int)  # None: taken from the data set
    c.data.classes = placeholder(tuple)  # labels to keep, renumbered from 0; None: all
    # A part of the training data, "1000" pictures or "10%" of them; None: all. For each subset_seed
    # a smaller part is within every larger one.
    c.data.subset = placeholder(str)
    c.data.subset_balanced = False  # the same number of each class, as far as it has so many
    c.data.subset_seed = 0  # of the draw
    c.data.multi_label = False  # whether an image may have several labels, or none
    # Train on probabilities of the classes, as soft pseudo labels are; other labels become 0 and 1.
    c.data.soft_labels = False
    # Size of the training data; of a mixture, of all its data sets together. This many examples are
    # one epoch, whatever data.repeats and the weights in data.mix. None: taken from the data.
    c.data.num_examples = placeholder(int)
    c.data.mix = ""  # "NAME=WEIGHT, NAME@SPLIT=WEIGHT"; data.name gets the remaining weight
    c.data.order = placeholder(str)  # record or chunk; None: chunk for >= 100 million examples
    c.data.chunk_size = 64  # consecutive records that `chunk` reads together
    c.data.streams = placeholder(int)  # parallel streams of `chunk`; None: up to 256, by batch size
    c.data.repeats = 1  # views of each record in a batch (arXiv:1901.09335)
    c.data.reader = placeholder(str)  # TFDS: memory, offsets or array_record; None: by size
    c.data.max_corrupt_fraction = 0.1  # of the examples so far; the run stops above it
    c.data.ops = ""  # training ops: "decode|resize|flip" and so on
    # Views of data.image_size that a batch has of each picture, for objectives that learn from
    # several. With views and without data.ops, a batch has no other image.
    c.data.num_global = 0
    # Their ops; for each view, joined by ";", where they differ: the last hold for all that follow.
    c.data.global_ops = ""
    c.data.num_local = 0  # views of data.local_size
    c.data.local_ops = ""  # their ops, as in data.global_ops
    c.data.local_size = placeholder(object)  # int or (height, width), in pixels
    c.data.mean = (0.5, 0.5, 0.5)  # the model's input is (image / 255 - mean) / std
    c.data.std = (0.5, 0.5, 0.5)  # see data.mean


def _add_objective(c: ConfigDict) -> None:
    """What is minimised, for all objectives but self-distillation."""
    c.objective = ConfigDict()
    # supervised, distillation, masked_patches, mae, lejepa, self_distillation, or a plug-in's
    c.objective.name = "supervised"
    # The following keys are those of distillation. Frozen models to learn from: a source as
    # init_from takes, or several with their weights, "runs/a=3, runs/b=1".
    c.objective.teacher = placeholder(str)
    c.objective.mode = placeholder(str)  # hard, soft or features; None: hard
    # Share of the teachers in the loss; None: 0.5. Of lejepa: of SIGReg; None: 0.05.
    c.objective.weight = placeholder(float)
    c.objective.temperature = placeholder(float)  # of the mode soft; None: 3
    # Of the mode features: "pooled", "tokens", pairs of layers "5:11" (the student's first), or
    # several of these with commas; None: pooled.
    c.objective.features = placeholder(str)
    c.objective.distance = placeholder(str)  # of features: cosine or smooth_l1; None: cosine
    # Share of the patches that masked_patches corrupts (None: 0.5), or mae hides (None: 0.75).
    c.objective.mask_ratio = placeholder(float)
    # masked_patches: mean_colour, small_patch or pixels; None: mean_colour
    c.objective.target = placeholder(str)
    c.objective.norm_pixels = placeholder(bool)  # mae: normalise each patch to predict; None: True
    c.objective.decoder_width = placeholder(int)  # mae; None: 512
    c.objective.decoder_depth = placeholder(int)  # mae: number of layers; None: 8
    c.objective.decoder_heads = placeholder(int)  # mae; None: 16
    c.objective.decoder_mlp_dim = placeholder(int)  # mae; None: 4 times the decoder's width
    c.objective.embedding_width = placeholder(int)  # lejepa: outputs of its head; None: 64
    c.objective.directions = placeholder(int)  # lejepa: random ones, of SIGReg; None: 1024
    c.objective.points = placeholder(int)  # lejepa: of the integral of SIGReg, odd; None: 17


def _add_self_distillation(c: ConfigDict) -> None:
    """The keys of `objective.name=self_distillation`; after `_add_objective`."""
    # self_distillation; durations have units. Prototypes of each head; None: 65,536
    c.objective.num_prototypes = placeholder(int)
    c.objective.head_width = placeholder(int)  # of the heads' hidden layers; None: 2048
    c.objective.head_layers = placeholder(int)  # dense layers before the prototypes; None: 3
    c.objective.bottleneck = placeholder(int)  # width of the prototypes; None: 256
    c.objective.patch_head = placeholder(str)  # of hidden patches: shared or own; None: shared
    c.objective.centring = placeholder(str)  # centre, sinkhorn or none; None: centre
    c.objective.centre_momentum = placeholder(float)  # None: 0.9
    c.objective.student_temperature = placeholder(float)  # None: 0.1
    c.objective.teacher_temperature = placeholder(float)  # None: 0.04
    # Teacher's temperature at the start, from which it rises over temperature_warmup; None: none
    c.objective.first_temperature = placeholder(float)
    c.objective.temperature_warmup = placeholder(str)  # duration; goes with first_temperature
    c.objective.freeze_prototypes = placeholder(str)  # duration at the start; None: they learn
    c.objective.patch_weight = placeholder(float)  # of the loss of hidden patches; None: 0
    # Share of the global views of an image that have hidden patches; None: 0.5
    c.objective.masked_views = placeholder(float)
    c.objective.mask_min = placeholder(float)  # least share of hidden patches; None: 0.1
    c.objective.mask_max = placeholder(float)  # largest share of hidden patches; None: 0.5
    c.objective.koleo_weight = placeholder(float)  # of what spreads features apart; None: 0
    c.objective.koleo_group = placeholder(int)  # rows that are spread apart; None: a batch
    c.objective.gram_weight = placeholder(float)  # of the distance to the Gram teacher; None: 0
    c.objective.gram_every = placeholder(str)  # interval of copies; goes with gram_weight
    c.objective.gram_group = placeholder(int)  # images whose patches are compared; None: 1
    # Negative similarities: kept, removed or removed_from_teacher; None: kept
    c.objective.gram_negatives = placeholder(str)


def _add_loss(c: ConfigDict) -> None:
    """The loss of one example: arguments of `objectives.supervised.make_loss`."""
    c.loss = ConfigDict()
    c.loss.name = "softmax"  # or sigmoid, or the name of a plug-in's loss
    c.loss.label_smoothing = 0.0  # share of the target spread over all classes
    # "balanced", or one number per class with commas; None: no weights. See `make_loss`.
    c.loss.class_weights = placeholder(str)
    c.loss.z_loss = 0.0  # weight of log(Z)^2, Z the denominator of the softmax; 0: off


def _add_optimizer(c: ConfigDict) -> None:
    """The optimizer, gradient accumulation and the running average."""
    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"  # adamw, sgd, lion, rmsprop, adafactor or lars
    c.optimizer.peak_lr = placeholder(float)  # the largest learning rate of the schedule
    c.optimizer.weight_decay = 0.0  # multiplied by the current learning rate
    # Weight decay at the end of the run, reached by half a cosine; None: it stays the same.
    c.optimizer.weight_decay_end = placeholder(float)
    # Learning rate of the patch embedding / the rate it would have otherwise; None: 1.
    c.optimizer.embedding_rate = placeholder(float)
    # L2 regularisation: this factor of a parameter is added to its gradient, before clipping.
    c.optimizer.l2 = 0.0
    c.optimizer.weight_decay_on = ".*/kernel"  # regex over whole parameter names; of l2 too
    c.optimizer.grad_clip_norm = placeholder(float)  # global norm; None: no clipping
    c.optimizer.b1 = placeholder(float)  # None: 0.9 (adamw, lion, adafactor)
    # None: adamw 0.999, lion 0.99, rmsprop 0.9, adafactor at most 0.999
    c.optimizer.b2 = placeholder(float)
    c.optimizer.eps = placeholder(float)  # None: adamw 1e-8, rmsprop 1e-3, adafactor 1e-30
    c.optimizer.momentum = placeholder(float)  # sgd, rmsprop, lars; None: 0.9
    c.optimizer.momentum_dtype = placeholder(str)  # None: adafactor bfloat16, others float32
    c.optimizer.layer_decay = placeholder(float)  # a layer's rate / the next layer's; None: 1
    c.optimizer.freeze = placeholder(str)  # regex, e.g. encoder/layer_0/.*; None: nothing
    # Train only so many last layers and what follows them, by setting `freeze`; None: all.
    c.optimizer.last_layers = placeholder(int)
    # Microbatches whose gradients are summed before an update. None: chosen when the run starts, as
    # 1, or on CPUs so that the activations of a microbatch stay in the cache.
    c.optimizer.accum_steps = placeholder(int)
    c.optimizer.ema_decay = placeholder(float)  # running average of the parameters; None: off
    # Decay at the end of the run, reached by half a cosine, for an average that is a teacher; None:
    # the decay is constant, and smaller in the first steps.
    c.optimizer.ema_decay_end = placeholder(float)


def _add_schedule(c: ConfigDict) -> None:
    """The learning rate over time."""
    c.schedule = ConfigDict()
    c.schedule.name = "cosine"  # cosine, linear, rsqrt, exponential, multistep or constant
    c.schedule.warmup = "0 steps"  # linear from 0 at the start
    c.schedule.cooldown = "0 steps"  # linear to 0 at the end, on top of the decay
    c.schedule.timescale = "10000 steps"  # rsqrt, exponential
    # How to set duration, optimizer.peak_lr and schedule.warmup from the number of examples, where
    # these have their defaults: bit, see experiment/finetune_length.py; None: they must be set.
    c.schedule.rule = placeholder(str)
    c.schedule.milestones = ""  # multistep: "200 steps, 300 steps"; each divides the rate by 10


def _add_layout(c: ConfigDict) -> None:
    """How the devices share the work."""
    # On TPUs and GPUs, give these keys the fastest values that fit, where they have their defaults:
    # mesh.data and mesh.fsdp, model.scan, model.remat and model.remat_layers.
    c.auto = True
    c.mesh = ConfigDict()  # sizes of the mesh axes; -1: all remaining devices
    c.mesh.replica = placeholder(int)  # across TPU slices; None: the number of slices
    # Splits batches and the optimizer's state; None: -1, or as `auto` chooses.
    c.mesh.data = placeholder(int)
    c.mesh.fsdp = placeholder(int)  # splits parameters too; None: 1, or as `auto` chooses
    c.mesh.tensor = 1  # splits heads and inner channels
    c.mesh.platform = placeholder(str)  # cpu, gpu or tpu; None: the best available


def _add_checkpoint(c: ConfigDict) -> None:
    """Which checkpoints are saved and kept."""
    c.checkpoint = ConfigDict()
    c.checkpoint.every = "1000 steps"  # between two saves
    c.checkpoint.keep_last = 2  # number of newest checkpoints to keep
    c.checkpoint.keep_every = placeholder(str)  # interval of saves to keep for ever; None: off
    # Metric, such as val/top1, whose best step so far is saved and kept; None: off.
    c.checkpoint.keep_best = placeholder(str)


def _add_stop(c: ConfigDict) -> None:
    """When a run stops early."""
    c.stop = ConfigDict()  # early stopping
    c.stop.metric = placeholder(str)  # metric of an evaluator, such as val/loss; None: off
    c.stop.patience = 5  # evaluations in a row without a better value that end the run


def _add_log(c: ConfigDict) -> None:
    """What is logged."""
    c.log = ConfigDict()
    c.log.every = "50 steps"  # between two rows of metrics
    c.log.wandb = placeholder(str)  # project in Weights & Biases; None: off
    c.log.by_layer = False  # log norms of each layer; costs a backward pass per logged row
    c.log.profile = placeholder(str)  # "10:15" traces steps 11 to 15; None: off


def _add_job(c: ConfigDict) -> None:
    """The processes of a run."""
    c.job = ConfigDict()  # deadlines of the job's processes, in seconds
    c.job.join_deadline_s = 1800  # until all processes have started
    c.job.heartbeat_s = 100  # a process that is silent for this long counts as dead
    c.job.step_deadline_s = placeholder(float)  # None: 0.6 * heartbeat_s; one process: an hour
    c.job.compile_deadline_s = 3600.0  # each phase before the first step
    c.job.evaluation_deadline_s = 3600.0  # each evaluator
    c.job.save_deadline_s = 3600.0  # each save, and stopping the threads that read ahead


def _add_study(c: ConfigDict) -> None:
    """The studies."""
    c.study = ConfigDict()  # read by the command `study`; `train` ignores it
    c.study.name = placeholder(str)  # a key of studies.STUDIES
    c.study.peak_lrs = ()  # candidates to choose from
    c.study.seeds = 3  # number of runs with the chosen setting
    c.study.train_split = placeholder(str)  # split of data.name to train on during the search
    c.study.dev_split = placeholder(str)  # split of data.name that selects the setting
    c.study.metric = "held_out/top1"  # metric of the only evaluator; higher is better
    c.study.cells = ()  # cells of a grid: "row | column: key=value; key=value"
    # Stages of noisy_student, "name: key=value; key=value": a teacher, and students that learn from
    # the pseudo labels of the stage before. Of pretraining: its methods.
    c.study.stages = ()
    c.study.finetunings = ()  # of pretraining: "name: key=value; key=value"
    c.study.unlabelled = placeholder(str)  # pictures that the stages label: "NAME" or "NAME@SPLIT"
    c.study.unlabelled_dir = placeholder(str)  # their data_dir; None: data.data_dir
    c.study.ratio = 1.0  # pictures with pseudo labels for each labelled one in a batch
    c.study.soft_labels = True  # pseudo labels are probabilities; False: the most likely class
    c.study.confidence = 0.3  # smallest probability of a pseudo label that is kept
    # Pictures of each class: its most confident ones, or repeated ones if it has fewer; None: all.
    c.study.per_class = placeholder(int)
    # grid: settings, "name: key=value; key=value"; each cell keeps the best one.
    c.study.candidates = ()
    c.study.choose_by = placeholder(str)  # metric that chooses among candidates
    c.study.point = "last"  # step that counts: last, or best, as checkpoint.keep_best finds it
    c.study.finetune = ""  # keys of the fine-tuning that follows, "key=value; key=value"; "": none
    c.study.finetune_metric = placeholder(str)  # metric of the fine-tuned model
    c.study.durations = ()  # scaling: values of `duration`; (): the config's own
    c.study.topology = placeholder(str)  # scaling: chips on which TPU-core-days are planned
    c.study.sweep = ()  # values of a sweep, as in --sweep: "optimizer.peak_lr=1e-3,3e-3"
