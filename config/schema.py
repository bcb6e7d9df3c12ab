"""Every setting of a run, with its default, bounds and meaning, as frozen dataclasses."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
)

# Error messages quote these docstrings as the expected type.
Fraction = restricted_number_type(
    "Fraction", float, [(">=", 0), ("<", 1)], docstring="float >=0 and <1"
)
ExampleLength = restricted_number_type("ExampleLength", int, (">=", 2), docstring="int >=2")
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**63)], docstring="int >=0 and <2^63")
HeartbeatSeconds = restricted_number_type("HeartbeatSeconds", int, (">=", 5), docstring="int >=5")
SpikeWindow = restricted_number_type(
    "SpikeWindow", int, [(">=", 8), ("<=", 1000)], docstring="int >=8 and <=1000"
)
Hours = restricted_number_type("Hours", float, (">=", 1), docstring="float >=1")

RowFormat = Literal[
    "auto", "messages", "sharegpt", "conversational", "prompt_completion", "instruction", "dolly",
    "oasst", "text",
]  # fmt: skip
HELD_OUT = "held_out"
"""Name of the held-out set where there is only one, without a name."""
CHAT_TEMPLATES = Path(__file__).resolve().parent.parent / "data" / "chat_templates"


def chat_template_file(name: str) -> Path:
    """The file that model.chat_template refers to, by path or by name in data/chat_templates."""
    named = CHAT_TEMPLATES / f"{name}.jinja"
    return named if named.is_file() and not Path(name).is_file() else Path(name)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685), by peft: for a frozen matrix W, W + alpha / r * B A is
    used, with A and B of rank r trained.
    """

    r: PositiveInt = 16
    """Rank."""
    alpha: PositiveInt = 32
    """The adapter's output is scaled by alpha / r."""
    dropout: Fraction = 0.0
    """Dropout of the adapter's input."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Modules with adapters, by the ends of their names, such as [q_proj, v_proj]; all-linear:
    every linear layer but the output head, and neither experts nor routers.
    """
    target_parameters: list[str] = field(default_factory=list)
    """Parameters with adapters that are in no linear layer: [experts.gate_up_proj,
    experts.down_proj] are the experts of a mixture, each of which gets an adapter of rank r. They
    are added to the weights of all experts before each use, and cannot have dropout.
    """
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained as a whole instead, such as [embed_tokens, lm_head]."""


@dataclass(frozen=True)
class ModelConfig:
    """The model and its tokenizer."""

    name_or_path: str
    """Hub id, or a folder with a config.json (and weights, unless from_config)."""
    from_config: bool = False
    """Initialize the weights randomly, with train.seed, instead of loading pretrained ones."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; default: model.name_or_path."""
    revision: str | None = None
    """Branch, tag or commit on the hub; the run folder's resolved_config.yaml has the commit."""
    tokenizer_revision: str | None = None
    """The same of model.tokenizer; default: model.revision."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template, or the name of a bundled one: alpaca,
    chatml, llama3, plain, zephyr."""
    eos_token: str | None = None
    """Token of the tokenizer that ends an answer; default: its eos token and what its chat template
    writes. Added after the last turn if the template writes no end token there."""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2 ...; default: chosen by transformers, or packed_examples, of
    model/packed_attention.py, for packed examples.
    """
    loss_chunk_tokens: NonNegativeInt = 1024
    """Supervised tokens whose logits exist at a time, in the loss; 0: those of a micro-batch."""
    activation_checkpointing: bool | Literal["cpu"] = False
    """Recompute activations in the backward pass: about 1/3 more compute, far less memory. cpu:
    also keep the inputs of the blocks, which remain, in CPU memory.
    """
    tiled_mlp: NonNegativeInt = 0
    """Compute the MLP of each block over this many parts of a micro-batch's tokens in turn, and
    again in the backward pass: less memory for long micro-batches; 0: off. Not for experts.
    """
    compile: bool = False
    """torch.compile each block: faster after minutes of compilation; needs a C++ compiler on CPU.
    Experts are compiled too, whichever ones the tokens choose, but not those with adapters.
    """
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code that you have read."""
    ignore_weights: list[str] = field(default_factory=list)
    """Regular expressions for tensors in the model's files that are not to be loaded, e.g. layers
    used only for speculative decoding. Other tensors unknown to the architecture are an error.
    """
    lora: LoraConfig | None = None
    """Train adapters and freeze the weights. Learning rates are about ten times those of training
    all weights (Schulman et al. 2025, "LoRA Without Regret"), often 1e-4 to 2e-4.
    """
    trainable: list[str] = field(default_factory=list)
    """Regular expressions: train the parameters with a match in their name, and freeze the others;
    default: all are trained.
    """
    quantization: Literal["nf4"] | None = None
    """nf4: freeze the linear layers in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes, which has
    to be installed; with model.lora, at ZeRO stages 0 to 2.
    """


@dataclass(frozen=True)
class Source:
    """Where rows come from: a path or a data set of the hub."""

    path: str | None = None
    """File, folder or glob: JSONL, JSON, CSV, Parquet, Arrow, also with .gz, .zst, .bz2."""
    hub: str | None = None
    """Data set id on the hub, owner/name."""
    subset: str | None = None
    """Name of the hub data set's configuration."""
    split: str = "train"
    """Split of the hub data set."""
    revision: str | None = None
    """Branch, tag or commit of the hub data set."""
    weight: float | None = None
    """Share of this source in the mix, relative to the other weights; give all sources one or none.
    """
    format: RowFormat | None = None
    """Row format; default: data.format."""
    columns: dict[str, str] | None = None
    """Renamed keys; default: data.columns."""
    ignore_keys: list[str] | None = None
    """Ignored keys; default: data.ignore_keys."""
    roles: dict[str, str] | None = None
    """Renamed roles; default: data.roles."""


@dataclass(frozen=True)
class DataConfig:
    """The data sets, how rows are tokenized, and the size of micro-batches."""

    train_sources: list[str | Source]
    """Paths, or {path or hub: ..., weight: ...} objects. Without weights, each epoch has every row
    once.
    """
    eval_sources: list[str | Source] | dict[str, list[str | Source]] = field(default_factory=list)
    """Sources of held-out rows, given in the same way; or several sets, {name: sources}. The first
    one's loss is eval_loss.
    """
    eval_fraction: Fraction = 0.0
    """Hold out this share of the training rows instead of eval_sources; drawn with train.seed."""
    format: RowFormat = "auto"
    """Row format; auto: detected from the keys of each source's first row."""
    columns: dict[str, str] = field(default_factory=dict)
    """Key of the row format: key in the file; {prompt: question, completion: answer} reads gsm8k.
    """
    ignore_keys: list[str] = field(default_factory=list)
    """Keys to ignore in rows, messages, tool calls and content parts, as spelled in the file."""
    roles: dict[str, str] = field(default_factory=dict)
    """Role in the file: role in the chat template, e.g. {bot: assistant, critic: critic}."""
    as_chat: bool = False
    """Render prompt/completion and instruction rows as one user and one assistant turn."""
    supervise: Literal["answers", "last", "all"] = "answers"
    """Which tokens are supervised: all assistant turns (or the completion), only the last of them,
    or every token.
    """
    max_length: ExampleLength = 2048
    """Longest example, in tokens."""
    on_too_long: Literal["truncate", "split", "drop", "error"] = "truncate"
    """What to do with a row of more than max_length tokens; such rows are counted and reported."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with an unusable row. error: stop and name it; skip: leave it out, count it and
    list it in rejected_rows.jsonl.
    """
    special_tokens_in_text: Literal["escape", "allow", "refuse"] = "escape"
    """What to do with the text of a special token, such as <|end|>, in a row's own text. escape:
    tokenize it as plain text; allow: as the token; refuse: a bad row. Such rows are counted and
    reported. The marks of the chat template always are tokens.
    """
    max_row_characters: PositiveInt = 8_000_000
    """A row with more characters is a bad one; most likely its file lacks line breaks."""
    batching: Literal["auto", "bucketed", "packed"] = "auto"
    """bucketed: a micro-batch is padded examples of similar length; packed: examples concatenated
    without padding; auto: packed if the model can attend within each example alone, on CUDA in bf16
    or fp16 by torch's varlen kernel.
    """
    micro_batch_tokens: PositiveInt = 16384
    """Memory budget: most tokens, including padding, in one micro-batch of one rank."""
    pad_to_multiple_of: PositiveInt = 8
    """Bucketed examples are padded to a multiple of this; 8 suits tensor cores."""
    window: PositiveInt = 1
    """Sort the examples of this many steps together: less padding, but steps are less random."""
    cache_dir: str = ".cache/tokenized"
    """Tokenized examples, one folder per (files, tokenizer, options)."""
    workers: NonNegativeInt = 0
    """Tokenizing processes per machine; 0: one per 10,000 rows, at most the number of cores."""

    def sources(self, key: str) -> list[Source]:
        """train_sources, or eval_sources of all sets, each as a Source with the defaults of this
        section.
        """
        given = getattr(self, key)
        sets = given.values() if isinstance(given, dict) else [given]
        return self._complete([source for sources in sets for source in sources])

    def eval_sets(self) -> dict[str, list[Source]]:
        """The sources of each held-out set; a list of sources is one set."""
        given = self.eval_sources
        sets = given if isinstance(given, dict) else {HELD_OUT: given}
        return {name: self._complete(sources) for name, sources in sets.items() if sources}

    def set_names(self) -> list[str]:
        """The names of the held-out sets, the first one first."""
        return list(self.eval_sets()) or ([HELD_OUT] if self.eval_fraction else [])

    def _complete(self, given: list[str | Source]) -> list[Source]:
        sources = [Source(s) if isinstance(s, str) else s for s in given]
        return [
            dataclasses.replace(
                s,
                format=s.format or self.format,
                **{
                    name: getattr(self if getattr(s, name) is None else s, name)
                    for name in ("columns", "ignore_keys", "roles")
                },
            )
            for s in sources
        ]


@dataclass(frozen=True)
class TrainConfig:
    """Optimization, in units of examples (or tokens) and optimizer steps."""

    learning_rate: NonNegativeFloat
    """Peak learning rate at the reference global batch, before scaling."""
    global_batch_size: PositiveInt | None = None
    """Most examples per optimizer step, over all ranks; an epoch is split into steps of equal size.
    The number of micro-steps follows from it.
    """
    global_batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step, over all ranks, instead of global_batch_size; steps have nearly
    equal token counts.
    """
    epochs: PositiveInt | None = None
    """Passes over the data. Give epochs or steps."""
    steps: PositiveInt | None = None
    """Optimizer steps. Give epochs or steps."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """learning_rate * (mean global batch / reference global batch) ** p, p = 0, 0.5 or 1."""
    reference_global_batch_size: PositiveInt | None = None
    """The global batch that learning_rate was tuned for, in examples; needed by sqrt and linear."""
    reference_global_batch_tokens: PositiveInt | None = None
    """The same in tokens, for use with global_batch_tokens."""
    lr_schedule: (
        Literal[
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
        ]
        | None
    ) = None
    """Name of a schedule of transformers' get_scheduler or of DeepSpeed; default: the scheduler of
    ds_config, else cosine.
    """
    lr_schedule_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of that schedule: {min_lr_rate: 0.1}, {num_decay_steps: 100} ..."""
    warmup_examples: NonNegativeInt = 0
    """The learning rate rises linearly over this many examples, whatever the global batch."""
    warmup_tokens: NonNegativeInt = 0
    """The same in tokens, for use with global_batch_tokens."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay; not applied to parameters of one dimension (biases, norms).
    """
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's betas."""
    adam_epsilon: NonNegativeFloat = 1e-8
    """AdamW's epsilon."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Maximum global L2 norm of the gradient; 0 turns clipping off."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute precision; auto: bf16 on GPUs that support it, else fp16; fp32 on CPU."""
    seed: Seed = 42
    """Seeds weight initialization and the step plan; dropout uses a hash of seed and rank."""

    @property
    def global_batch_key(self) -> str:
        """The one of global_batch_size and global_batch_tokens that is set."""
        by_size = self.global_batch_tokens is None
        return "global_batch_size" if by_size else "global_batch_tokens"

    @property
    def global_batch(self) -> int:
        """Examples or tokens per optimizer step, according to global_batch_key."""
        return getattr(self, self.global_batch_key)

    @property
    def reference_global_batch(self) -> int | None:
        """In the unit of global_batch."""
        return getattr(self, f"reference_{self.global_batch_key}")

    @property
    def warmup_key(self) -> str:
        return "warmup_examples" if self.global_batch_tokens is None else "warmup_tokens"

    @property
    def warmup(self) -> int:
        """In the unit of global_batch."""
        return getattr(self, self.warmup_key)


@dataclass(frozen=True)
class EvalConfig:
    """When to evaluate on the held-out sets, what to measure, and when to stop early."""

    every_steps: NonNegativeInt = 0
    """Evaluate every this many steps and at the end; 0: only at the end."""
    at_start: bool = True
    """Evaluate before the first step."""
    metric: str = "eval_loss"
    """Which value decides what is best, for checkpoint.keep_best and patience: eval_loss, or
    loss/NAME, perplexity/NAME, exact_match/NAME or score/NAME of the set NAME.
    """
    patience: NonNegativeInt = 0
    """Finish the run early after this many evaluations in a row without a better metric; 0: never.
    """
    generate: NonNegativeInt = 0
    """Let the model answer this many examples of each set, by greedy decoding, and score the
    answers; 0: none.
    """
    max_new_tokens: PositiveInt = 256
    """Longest answer, in tokens."""
    scorer: str = "exact_match"
    """How an answer is scored: the name of a function in data/scorers.py."""

    @property
    def score_name(self) -> str:
        """What the mean score of a set is called."""
        return "exact_match" if self.scorer == "exact_match" else "score"


@dataclass(frozen=True)
class GuardConfig:
    """Steps that must not spoil the weights: a loss or gradient that is not finite, whose update is
    always skipped, and spikes of the loss.
    """

    max_skipped_in_a_row: PositiveInt = 5
    """Stop the run when this many updates in a row were skipped."""
    on_spike: Literal["off", "warn", "skip", "stop"] = "warn"
    """What to do about a loss far above the last ones: warn; skip the update; or stop before it."""
    spike_z: PositiveFloat = 10.0
    """How far: in robust standard deviations above the median."""
    spike_window: SpikeWindow = 64
    """Over how many steps; until there are that many, no loss is a spike."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, which checkpoints to keep, and what to resume from."""

    every_steps: NonNegativeInt = 0
    """Save every this many steps and at the end; 0: only at the end."""
    every: Literal["auto"] | None = None
    """auto, instead of every_steps: at the interval that costs the least time, by Daly's formula
    (checkpoint/save_interval.py), from the measured time for which a save blocks training.
    """
    host_mtbf_hours: Hours = 5000.0
    """Mean time between failures of one host, for every: auto. Llama 3 had 419 interruptions in 54
    days on 2,048 hosts: 6,300 hours (arXiv:2407.21783).
    """
    keep_last: PositiveInt = 2
    """Complete checkpoints to keep; older ones are deleted once a newer one is complete."""
    keep_every_steps: NonNegativeInt = 0
    """Never delete checkpoints whose step is a multiple of this; 0: none."""
    keep_best: NonNegativeInt = 0
    """Also keep this many checkpoints with the best eval.metric at their step; an evaluation that
    is better than all before is followed by a save.
    """
    async_save: bool = False
    """Write from a copy in CPU memory while training continues; needs memory for that copy."""
    on_failed_save: Literal["stop", "continue"] = "stop"
    """When a save fails, e.g. on a full disk: stop: end the run; continue: warn and train on."""
    after_save: str | None = None
    """A command for sh that is run once a checkpoint is complete, for example to copy it: rclone
    copy "$CHECKPOINT" remote:bucket/run/$(basename "$CHECKPOINT"). Training goes on meanwhile; a
    failure is a warning. docs/checkpoints.md has its variables, and how to get a copy back.
    """
    after_save_timeout_seconds: PositiveInt = 3600
    """A command of after_save that takes longer is stopped. The end of the run waits for the last
    one; a preempted run only while launch.preempt_grace_seconds allows it.
    """
    verify: Literal["sizes", "checksums"] = "sizes"
    """How files of a checkpoint are checked before resuming from it; checksums reads all of them.
    """
    allow_plan_change: bool = False
    """Resume although the global batch, train.seed, data.window, the data, the learning rate or the
    schedule changed. The rest of the epoch comes first, in steps of the new plan.
    """
    node_local: bool = False
    """output_dir is on each node's own disk: every node holds its own ranks' shards of a
    checkpoint. scripts/gather_checkpoint.py puts them together.
    """
    resume: str = "auto"
    """auto: resume from the newest complete checkpoint in output_dir, if any; none: start at step
    0; or the checkpoint folder to resume from.
    """
    weights_only: bool = False
    """Start at step 0 with the weights of the checkpoint folder given by resume, from any run of
    the same model; once output_dir has checkpoints, resume from those.
    """


@dataclass(frozen=True)
class TrackingConfig:
    """Weights & Biases and TensorBoard; metrics.jsonl in output_dir is written in any case."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    """offline writes a folder that `wandb sync` uploads later."""
    project: str = "deepspeed-zero"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""
    run_name: str | None = None
    """W&B run name; default: the name of output_dir."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    wandb_live: bool = False
    """W&B's curves end at the last checkpoint, so that a resumed run does not repeat steps in them.
    true: they end at the last step, and a resumed run that repeats steps becomes another W&B run.
    """
    wandb_artifacts: bool = False
    """Record checkpoints, and models that scripts/export.py writes, as W&B artifacts that refer to
    their paths; nothing of them is uploaded.
    """
    wandb_shared: bool = False
    """Also show the system metrics of the other nodes, by W&B's mode shared; needs wandb: online.
    """
    tensorboard: bool = False
    """Also write TensorBoard's event files, into OUTPUT_DIR/tensorboard."""
    rank_window_steps: PositiveInt = 50
    """Compare the ranks' own times, and report their GPUs, every this many steps."""
    peak_tflops_per_s: PositiveFloat | None = None
    """Peak of one device in dense matrix products, for the model FLOPs utilization (MFU); default:
    that of its data sheet in bf16 and fp16, for GPUs in runtime/gpu.py.
    """


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles of some steps by torch.profiler; touch OUTPUT_DIR/profile_now for one while a run
    trains.
    """

    start: NonNegativeInt = 0
    """First step to profile; 0: none."""
    steps: PositiveInt = 3
    """Number of steps to profile."""
    ranks: list[NonNegativeInt] = field(default_factory=lambda: [0])
    """Ranks to profile; the others are not slowed down."""


@dataclass(frozen=True)
class DistributedConfig:
    """The process group."""

    timeout_seconds: PositiveInt = 1800
    """Timeout of collectives, ZeRO's own included; one that takes longer ends the run with an
    error.
    """
    data_timeout_seconds: PositiveInt = 86400
    """Longest wait for the first rank of each machine to tokenize the data."""
    warn_seconds: PositiveInt = 300
    """When training has not moved on for this long, rank 0 reports which ranks it waits for, and
    where in the code they are.
    """


@dataclass(frozen=True)
class LaunchConfig:
    """Launching on several hosts with scripts/launch.sh, world size and preemption."""

    heartbeat_seconds: HeartbeatSeconds = 60
    """When a host stops responding, the job is stopped on all hosts within this time."""
    world_size: PositiveInt | None = None
    """Refuse to run with another number of ranks. scripts/launch.sh checks this by itself."""
    preempt_grace_seconds: PositiveInt = 120
    """A preempted rank that has not saved and exited after this time exits at once. DeepSpeed's own
    launcher kills its ranks after 30 s, whatever this is.
    """
    restart_wait_seconds: NonNegativeInt = 120
    """With --max_restarts: wait this long for all hosts, then restart on the healthy ones."""


@dataclass(frozen=True)
class Config:
    """The config of a training run."""

    output_dir: str
    """Folder of the run: resolved configs, metrics.jsonl, checkpoints/."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    ds_config: str = "ds_configs/zero2.json"
    """DeepSpeed config file: ZeRO stage, offload, communication."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer or self.model.name_or_path
