"""Every setting of a run, with its default, bounds and meaning, in frozen dataclasses."""

import re
from collections.abc import Iterator
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

MAX_INT = 2**40
"""Larger integers would overflow somewhere."""
PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
ScheduleArgument = Annotated[int | float | str, Field(union_mode="left_to_right")]
SetName = Annotated[str, Field(pattern=r"^[\w.-]+$")]
Seconds = Annotated[int, Field(gt=0, le=10_000_000)]

RowFormat = Literal[
    "auto", "tokens", "messages", "sharegpt", "conversational", "prompt_completion", "instruction",
    "text",
]  # fmt: skip
COMMIT = re.compile("[0-9a-f]{40}")
HELD_OUT = "held_out"
"""Name of the only held-out set, if it has no name."""
CHAT_TEMPLATES = Path(__file__).resolve().parents[2] / "data" / "chat_templates"


def chat_template_file(name: str) -> Path:
    """Return the file that model.chat_template names, by path or by name in data/chat_templates."""
    named = CHAT_TEMPLATES / f"{name}.jinja"
    return named if named.is_file() and not Path(name).is_file() else Path(name)


class Section:
    """A part of the config. pydantic rejects unknown keys and wrong types. __post_init__ rejects
    values that contradict each other.
    """

    __pydantic_config__ = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # for --help
    )


class LoraOptions(TypedDict, total=False):
    """Options of peft's LoraConfig, by its names; ds_configs/README.md describes them."""

    use_rslora: bool
    use_dora: bool
    target_parameters: list[str]
    init_lora_weights: Literal["gaussian", "orthogonal", "olora", "pissa", "pissa_niter_16"]


@dataclass(frozen=True)
class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685), by peft. In place of a frozen matrix W, the model uses
    W + alpha / r * B A, where A and B have rank r and are trained.
    """

    r: PositiveInt = 16
    """Rank."""
    alpha: PositiveInt = 32
    """The adapter's output is scaled by alpha / r."""
    dropout: Fraction = 0.0
    """Dropout of the adapter's input."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Modules with adapters, by the ends of their names, such as [q_proj, v_proj]; all-linear:
    every linear layer except the output head, experts, routers, and what Mamba's kernels read.
    """
    modules_to_save: list[str] = field(default_factory=list)
    """Modules to train as a whole, without adapters, such as [embed_tokens, lm_head]."""
    options: LoraOptions = field(default_factory=dict)
    """Options of peft's LoraConfig: use_rslora, use_dora, init_lora_weights (gaussian, orthogonal,
    olora, pissa, pissa_niter_16), target_parameters for experts. See ds_configs/README.md.
    """

    @property
    def changes_base(self) -> bool:
        """Whether the adapters begin as parts of the frozen weights, which lose these parts."""
        return self.options.get("init_lora_weights", "").startswith(("olora", "pissa"))


@dataclass(frozen=True)
class ModelConfig(Section):
    """The model and its tokenizer."""

    name_or_path: str
    """Hub id, as ID@REVISION for a branch, tag or commit, or a folder with a config.json (and
    weights, unless from_config). The run folder's resolved_config.yaml has the commit.
    """
    from_config: bool = False
    """Initialize the weights randomly, with train.seed, instead of loading pretrained ones."""
    tokenizer: str | None = None
    """Hub id (also ID@REVISION) or folder of the tokenizer; default: model.name_or_path."""
    chat_template: str | None = None
    """Jinja file (or JSON with the key chat_template) that replaces the tokenizer's chat template,
    or the name of one in data/chat_templates, such as chatml or llama3.
    """
    chat_template_kwargs: dict[SetName, bool | str] = field(default_factory=dict)
    """Values for variables of the chat template, such as {enable_thinking: false}. They are written
    into the template, so that an export's server uses them, too.
    """
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2 ...; default: chosen by transformers; for packed examples
    packed_examples, from zerotrain/model/packing.py.
    """
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about 1/3 more compute, far less memory."""
    compile: bool = False
    """torch.compile each block: faster after minutes of compilation; needs a C++ compiler on CPU.
    Micro-batches of few tokens gain most. Experts are compiled too, except experts with adapters.
    """
    trust_remote_code: bool = False
    """Run Python code that comes with the model; settable only on the command line. Read that code
    first.
    """
    lora: LoraConfig | None = None
    """Train adapters and freeze the weights. They need about ten times the learning rate of full
    training (Schulman et al. 2025, "LoRA Without Regret"), often 1e-4 to 2e-4.
    """
    trainable: list[str] = field(default_factory=list)
    """Regular expressions: train the parameters whose names have a match, and freeze the others;
    default: train all.
    """
    quantization: Literal["nf4"] | None = None
    """nf4: freeze the linear layers in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes, on GPUs;
    with model.lora, at ZeRO stages 0 to 2.
    """

    def __post_init__(self) -> None:
        if self.lora and self.trainable:
            raise ValueError("give lora or trainable; lora.modules_to_save trains whole modules")
        if self.quantization and (self.lora is None or self.from_config):
            raise ValueError("quantization needs lora, and pretrained weights")
        if self.quantization and self.lora.options.keys() - {"use_dora", "use_rslora"}:
            raise ValueError("of lora.options, quantization takes only use_dora and use_rslora")
        for pattern in self.trainable:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"trainable: {pattern}: {error}") from error


@dataclass(frozen=True)
class Source(Section):
    """Rows of a path or of a data set on the hub."""

    path: str | None = None
    """File, folder or glob: JSONL, JSON, CSV, Parquet, Arrow, also with .gz, .zst, .bz2."""
    hub: str | None = None
    """Data set id on the hub, owner/name."""
    subset: str | None = None
    """Name of the hub data set's configuration."""
    split: str = "train"
    """Split of the hub data set; of a path, the split that its rows may name."""
    revision: str | None = None
    """Branch, tag or commit of the hub data set."""
    format: RowFormat = "auto"
    """Row format; default: detected from the keys of the first row. tokens: input_ids, with labels
    or a loss_mask.
    """
    columns: dict[str, str] = field(default_factory=dict)
    """Key of the row format: key in the file; {prompt: question, completion: answer} reads gsm8k.
    """
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with an unusable row. error: stop and name it; skip: leave it out, count it and
    list it in a file that the start-up table names.
    """
    repeat: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """How many times an epoch passes over a training source; 0.3: each epoch uses a different 30%
    of its examples.
    """
    loss_weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of its tokens in the loss of a step; multiplies the weights of rows and messages."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.hub is None):
            raise ValueError("a source must have either path or hub")
        if self.path and (self.subset or self.revision):
            raise ValueError("subset and revision are only for hub data sets")


# The two functions below return unknown input unchanged, and pydantic rejects it.


def _as_source(given: Any) -> Any:
    """Return a text as the path of a source."""
    return {"path": given} if isinstance(given, str) else given


def _as_sets(given: Any) -> Any:
    """Return a list of sources as one held-out set, and an empty list as no set."""
    return {HELD_OUT: given} if given and not isinstance(given, dict) else given or {}


Sources = Annotated[list[Annotated[Source, BeforeValidator(_as_source)]], Field(min_length=1)]


@dataclass(frozen=True)
class DataConfig(Section):
    """The data sets, how rows are tokenized, and the size of micro-batches."""

    train_sources: Sources
    """Paths, or {path or hub: ..., repeat: 0.3} objects. An epoch has every row once, or `repeat`
    times.
    """
    eval_sources: Annotated[dict[SetName, Sources], BeforeValidator(_as_sets)] = field(
        default_factory=dict
    )
    """Sources of held-out rows, given in the same way; or several sets, {name: sources}. eval_loss
    is the loss of the first set.
    """
    eval_fraction: Fraction = 0.0
    """Hold out this share of the training rows instead of eval_sources; drawn with train.seed."""
    ignore_keys: list[str] = field(default_factory=list)
    """Keys to ignore in rows, messages, tool calls and content parts, as spelled in the file."""
    as_chat: bool = False
    """Render prompt/completion and instruction rows as one user and one assistant turn."""
    supervise: Literal["answers", "last", "all"] = "answers"
    """Which tokens are supervised. answers: all assistant turns, or the completion; last: only the
    last turn; all: every token.
    """
    max_length: Annotated[int, Field(ge=2, le=MAX_INT)] = 2048
    """Longest example, in tokens."""
    on_too_long: Literal["truncate", "split", "drop"] = "truncate"
    """truncate, split or drop a row of more than max_length tokens, and count it.
    """
    batching: Literal["auto", "bucketed", "packed"] = "auto"
    """bucketed: a micro-batch has padded examples of similar length; packed: it has concatenated
    examples without padding; auto: packed if the model's type is in the tested list of
    zerotrain/model/packing.py, on CUDA in bf16 or fp16 by torch's varlen kernel.
    """
    micro_batch_tokens: PositiveInt = 16384
    """Memory budget: the most tokens, including padding, in one micro-batch of one rank."""
    cache_dir: str = ".cache/tokenized"
    """Tokenized examples, one folder per (files, tokenizer, options)."""

    def __post_init__(self) -> None:
        if self.eval_sources and self.eval_fraction:
            raise ValueError("give eval_sources or eval_fraction, not both")
        for source in (source for given in self.eval_sources.values() for source in given):
            if source.repeat != 1 or source.loss_weight != 1:
                raise ValueError(
                    "eval_sources take no repeat and no loss_weight: each supervised token is "
                    "evaluated once; remove it"
                )


@dataclass(frozen=True)
class TrainConfig(Section):
    """Optimization, in units of examples (or tokens) and optimizer steps."""

    learning_rate: PositiveFloat
    """Peak learning rate at the reference global batch, before scaling."""
    global_batch_size: PositiveInt | None = None
    """The most examples per optimizer step, over all ranks; an epoch is split into steps of equal
    size. The number of micro-steps is computed from it.
    """
    global_batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step, over all ranks, instead of global_batch_size. Steps have nearly
    equal numbers of tokens.
    """
    epochs: PositiveInt | None = None
    """Passes over the data. Give epochs or steps."""
    steps: PositiveInt | None = None
    """Optimizer steps. Give epochs or steps."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """learning_rate * (mean global batch / reference global batch) ** p. none: p = 0; sqrt: 0.5;
    linear: 1.
    """
    reference_global_batch: PositiveInt | None = None
    """The global batch that learning_rate was tuned for, in the same unit; required by sqrt and
    linear.
    """
    lr_schedule: Literal[
        "auto",
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "warmup_stable_decay",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
    ] = "auto"
    """auto: the scheduler of ds_config, or cosine if it has none. WarmupLR, WarmupDecayLR and
    WarmupCosineLR are DeepSpeed's schedules, the others transformers'.
    """
    lr_schedule_args: dict[str, ScheduleArgument] = field(default_factory=dict)
    """Further arguments of the schedule: {min_lr_rate: 0.1}, {num_decay_steps: 100} ..."""
    warmup_examples: NonNegativeInt = 0
    """The learning rate rises linearly over this many examples, whatever the global batch."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay. As in transformers' Trainer, biases and norms have none; nor,
    unlike there, do other vectors, and A_log and D of state-space layers: decay would change
    scales and time constants.
    """
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's betas."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Maximum global L2 norm of the gradient; 0 turns clipping off."""
    skip_spikes: Annotated[float, Field(gt=1)] | None = None
    """Skip the update of a step whose gradient norm is above so many times the median of the last
    100 steps; null: none.
    """
    replay_every: PositiveInt | None = None
    """Run the first micro-batch of step 1 and of each N-th step twice, and end the run before the
    update if a bit of a rank's gradients differs: its host computes wrongly. null: never. Not tried
    on GPUs, where it needs deterministic operations: torch.use_deterministic_algorithms(True).
    """
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute precision: fp32, bf16 or fp16; auto: bf16 on GPUs that support it, else fp16; fp32 on
    CPU.
    """
    masters: Literal["spread", "loaded"] = "spread"
    """Where the fp32 master weights of a new run in bf16 or fp16 begin. spread: at the values of
    fp32 files, else at random points that round to the 16-bit weights, so that updates show at
    once; loaded: at the 16-bit weights.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Seeds weight initialization, spread masters and the step plan; dropout uses a hash of seed
    and rank.
    """

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps")
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise ValueError("give exactly one of global_batch_size and global_batch_tokens")
        if self.lr_scaling != "none" and self.reference_global_batch is None:
            raise ValueError(
                f"lr_scaling {self.lr_scaling} needs reference_global_batch, the global batch that "
                "learning_rate was tuned for"
            )
        if self.lr_schedule == "constant" and self.warmup_examples:
            raise ValueError("lr_schedule constant has no warm-up; use constant_with_warmup")
        if self.lr_schedule.startswith(("constant", "auto")) and self.lr_schedule_args:
            raise ValueError(f"lr_schedule {self.lr_schedule} takes no lr_schedule_args")

    @property
    def global_batch_key(self) -> str:
        """global_batch_size or global_batch_tokens, whichever is set."""
        by_size = self.global_batch_tokens is None
        return "global_batch_size" if by_size else "global_batch_tokens"

    @property
    def global_batch(self) -> int:
        """Examples or tokens per optimizer step; global_batch_key is the unit."""
        return getattr(self, self.global_batch_key)


@dataclass(frozen=True)
class EvalConfig(Section):
    """When to evaluate on the held-out sets, and what to measure."""

    every_steps: NonNegativeInt = 0
    """Evaluate before the first step, every this many steps, and at the end; 0: only at the end."""
    generate: NonNegativeInt = 0
    """Let the model answer this many examples of each set, by greedy decoding, and score the
    answers; 0: none.
    """
    max_new_tokens: PositiveInt = 256
    """Longest answer, in tokens."""


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """When to save, which checkpoints to keep, and what to resume from."""

    every_steps: NonNegativeInt = 0
    """Save every this many steps and at the end; 0: only at the end."""
    every_minutes: NonNegativeInt = 0
    """Save every this many minutes, in addition to every_steps; 0: never. A good interval is the
    square root of 2 x the minutes of a save x the minutes between failures.
    """
    keep_last: PositiveInt = 2
    """Number of complete checkpoints to keep; older ones are deleted once a new one is complete."""
    keep_best: bool = False
    """Also keep the checkpoint with the best eval_loss. A new best evaluation triggers a save.
    """
    async_save: bool = False
    """Write from a copy in CPU memory while training continues; needs memory for that copy."""
    allow_plan_change: bool = False
    """Resume although the global batch, the learning rate or its schedule changed. The rest of the
    epoch comes first, in steps of the new global batch.
    """
    resume: str = "auto"
    """auto: resume from the newest complete checkpoint in output_dir, if any. Or a checkpoint
    folder outside output_dir, which is used only while output_dir has no checkpoint.
    """
    weights_only: bool = False
    """Start at step 0 with the weights of the checkpoint folder that `resume` names, from any run
    of the same model; once output_dir has checkpoints, resume from those.
    """

    def __post_init__(self) -> None:
        if self.weights_only and self.resume == "auto":
            raise ValueError("weights_only needs resume PATH, the checkpoint folder to start from")


@dataclass(frozen=True)
class TrackingConfig(Section):
    """Weights & Biases. metrics.jsonl in output_dir is always written."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    """online, offline (a folder that `wandb sync` uploads later) or disabled; WANDB_MODE=offline,
    WANDB_MODE=disabled and WANDB_DISABLED=true can only make it stricter.
    """
    project: str = "deepspeed-zero"
    """Project; WANDB_ENTITY, WANDB_NAME and WANDB_TAGS name W&B's team, run and tags."""
    also: tuple[Literal["tensorboard", "mlflow", "trackio", "swanlab"], ...] = ()
    """Other trackers that get the same numbers. Their own variables, such as MLFLOW_TRACKING_URI,
    name their servers.
    """


@dataclass(frozen=True)
class DistributedConfig(Section):
    """The process group."""

    timeout_seconds: Seconds = 1800
    """Timeout of collectives, including ZeRO's own; a longer wait ends the run with an error.
    """
    world_size: PositiveInt | None = None
    """Refuse to run with a different number of ranks."""
    preempt_grace_seconds: Seconds = 120
    """Time for a preempted rank to save and exit; after it, the rank exits without saving.
    DeepSpeed's own launcher always kills its ranks after 30 s.
    """


@dataclass(frozen=True)
class Config(Section):
    """The config of a training run."""

    output_dir: str
    """Folder of the run: resolved configs, metrics.jsonl, checkpoints/."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    ds_config: str = "ds_configs/zero2.json"
    """DeepSpeed config file: ZeRO stage, offload, communication."""
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    distributed: DistributedConfig = DistributedConfig()

    def __post_init__(self) -> None:
        if self.eval.generate and self.data.supervise == "all":
            raise ValueError("eval.generate needs data.supervise answers or last")
        if self.checkpoint.keep_best and not (self.data.eval_sources or self.data.eval_fraction):
            raise ValueError("checkpoint.keep_best needs data.eval_sources or data.eval_fraction")


def section_of(kind: Any) -> type | None:
    """Return the class of a section, also for `SECTION | None`; None for other types."""
    kinds = (kind, *get_args(kind))
    return next((k for k in kinds if Section in getattr(k, "__mro__", ())), None)


def settings_of(section: type, prefix: str = "") -> Iterator[tuple[type, str, str]]:
    """Yield (section, name, dotted key) of each setting in a section and its subsections."""
    for f in fields(section):
        if nested := section_of(f.type):
            yield from settings_of(nested, f"{prefix}{f.name}.")
        else:
            yield section, f.name, prefix + f.name


def config_keys(section: type = Config) -> list[str]:
    """Return the dotted keys of a section."""
    return [key for _, _, key in settings_of(section)]
