"""The configuration of a run: every field takes effect or is an error.

The config is data: `mlxrl.train.config_file` reads it from TOML, `mlxrl.train.algorithms` turns its algorithm section
into an algorithm, and `mlxrl.train.optimizers` its optimizer section into an optimizer.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mlxrl.rollout import ChatEncoder
from mlxrl.train.algorithms import AlgorithmConfig, check_algorithm
from mlxrl.train.optimizers import OptimizerConfig
from mlxrl.train.sections import Section

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]

# Names of the environment that reads [data].
DATA_ENVIRONMENTS = ("dataset", "jsonl")


class SamplingSection(Section):
    """[sampling]: how rollouts draw tokens."""

    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Logits are divided by it, in sampling and in scoring alike."""
    top_p: Fraction = 1.0
    """Nucleus sampling; 1 keeps every token. Below 1 the sampler is not the policy that is trained."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than min_p times the most likely one; 0 keeps every token."""
    top_k: NonNegative = 0
    """Keep the k most likely tokens; 0 keeps every token."""


class UpdateConfig(Section):
    """[update]: how a batch of trajectories becomes optimizer steps."""

    updates_per_batch: Positive = 1
    """Passes over each batch; from the second on, ratios differ from 1 and clips act."""
    minibatches: Positive = 1
    """Optimizer steps a pass, each on its share of the trajectories."""
    max_tokens_per_micro_batch: Positive = 16384
    """Padded tokens that one forward and backward pass may hold; bounds memory, changes no result."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient to this global norm; 0 does not clip."""


class RolloutConfig(Section):
    """[rollout]: how episodes are generated."""

    width: Positive = 64
    """Most rows that decode at once."""
    context: Literal["transcript", "turn"] = "transcript"
    """What a later turn sees: the whole transcript, or its observation alone."""
    max_context: Positive | None = None
    """Most tokens of a transcript: an action is cut there, and an episode without room for another observation ends.
    By default what the model was made for, if its config says."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an action; the token that completes one is the action's last."""
    weights: Literal["shared", "merged", "auto"] = "shared"
    """What rollouts sample from: the model with its adapter beside it, a dense copy with the adapter merged into it
    (faster on some machines, for the memory of the copy), or the faster of the two, measured when the run starts."""
    kv_budget_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Most GB (2^30 bytes) of the rows' caches; rows wait while theirs would not fit. Without one, width alone bounds
    them."""
    deterministic: bool = True
    """Rows of several turns go on at points that the tokens alone decide; false: as soon as environments answer."""
    env_timeout: Annotated[float, Field(ge=0)] = 60.0
    """Seconds an environment has for an answer, after which its episode fails; 0 sets no bound, and environments then
    run in the main thread, one after the other."""

    @property
    def cache_bytes(self) -> int | None:
        """kv_budget_gb in bytes."""
        return None if self.kv_budget_gb is None else math.ceil(self.kv_budget_gb * 2**30)


class DataConfig(Section):
    """[data]: a file or dataset of tasks, one a row, for env_name = "dataset"."""

    path: str
    """File of JSON lines (.jsonl), one JSON list (.json), CSV (.csv) or parquet (.parquet); folder that save_to_disk of
    Hugging Face datasets wrote; or "hf:owner/name", a dataset of the hub."""
    format: Literal["jsonl", "json", "csv", "parquet"] | None = None
    """How the files are written, where their names do not say so."""
    split: str | None = None
    """Part of a dataset of several; by default "train"."""
    subset: str | None = None
    """Configuration of a dataset of the hub."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages."""
    answer_column: str = "answer"
    """Column that rewards read as `answer`."""
    columns: dict[str, str] = {}
    """Further names for columns, for example {prompt = "question", answer = "solution"}; rewards read all columns."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message before every prompt."""
    prompt_template: Annotated[str, Field(min_length=1)] | None = None
    """What to ask instead of a prompt column: a text with columns in braces, "Solve {question}"; {{ is a brace."""
    overlong: Literal["drop", "error"] = "drop"
    """Whether prompts of more than max_prompt_len tokens are left out and counted, or refused before the first step."""
    eval_path: str | None = None
    """Second file or dataset, whose rows are held out for evaluation."""
    eval_split: str | None = None
    """Split that is held out, of eval_path or else of path."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Instead, the share of the distinct prompts that is held out."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Draws that share; the same for every seed of the run, so that runs can be compared."""


class RewardConfig(Section):
    """[[rewards]]: one reward function."""

    name: str
    """A built-in name, path/to/file.py:function, or package.module:function."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor of the function in the total reward."""
    options: dict[str, Any] = {}
    """Options of the function, for example {pattern = "[0-9]+"}; a function of your own gets them by keyword."""
    timeout: Annotated[float, Field(ge=0)] | None = None
    """Seconds that a call may take, after which the rows that hang fail; 0 sets no bound, and the function then runs
    in the main thread. By default 30, and no bound for math, code-tests and llm-judge, which bound each row."""


class EvalConfig(Section):
    """[eval]: held-out evaluation before, during and after training."""

    tasks: NonNegative = 0
    """Held-out tasks an evaluation plays, once each; 0 evaluates nothing. Accuracy is the share of them on which every
    reward with a positive weight that did not abstain gave 1 and, where the environment rewards, the environment itself
    ended the episode with a positive last reward; tasks without a reward are left out."""
    every: NonNegative = 0
    """Evaluate every so many steps as well; 0 only before and after."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Sampling temperature of evaluations, from 0.01 on; 0 is greedy."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("every", "temperature"):
            if getattr(self, name) and not self.tasks:
                raise ValueError(f"{name} = {getattr(self, name)} has no effect without tasks; set tasks above 0")
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature = {self.temperature} must be 0, or at least 0.01")
        return self


class CheckpointConfig(Section):
    """[checkpoint]: what is kept of a run."""

    every: NonNegative = 50
    """Save every so many steps, and after the last; 0 only after the last."""
    keep: Positive = 3
    """Newest checkpoints that stay on disk."""


class LoggingConfig(Section):
    """[logging]: what is measured, and where it goes."""

    to: tuple[Literal["jsonl"]] = ("jsonl",)
    """Where the numbers of a step go: metrics.jsonl of the run folder, which is always written, is all there is."""
    full_score_every: NonNegative = 20
    """Measure entropy and mismatch on all rows in the first step and every so many after it, at the price of a forward
    pass over rows that teach nothing; other steps measure those that have a gradient. 0 never does."""


class TrainConfig(Section):
    """A run."""

    model_id: str
    """Folder of a model in mlx-lm format, or its name on the hub; "embedded" is the small one that mlxrl-cli brings."""
    env_name: str = "arithmetic"
    """What is learned: a built-in environment, path/to/file.py:factory, or package.module:factory."""
    steps: Positive = 100
    """Optimizer batches to train on."""
    group_size: Positive = 8
    """Samples of each task, compared with one another."""
    groups_per_step: Positive = 8
    """Tasks a step."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random: adapter, order of tasks, sampling, dropout."""
    code_folder: str | None = None
    """Where the files of env_name and [[rewards]] lie, if they are named by relative paths; by default the folder where
    the run begins, which its own config keeps."""
    output: str | None = None
    """Run folder; without one, the first free runs/ENVIRONMENT-ALGORITHM-NUMBER. A name that ends in .npz saves the
    last batch under it and makes the folder the name without the ending."""

    max_prompt_len: Positive = 512
    """Most tokens of a prompt; tasks with longer ones are left out and counted, or refused (data.overlong)."""
    max_completion_len: Positive = 256
    """Most tokens of an action: of the whole completion in a single turn, of each turn otherwise."""
    max_turns: Positive | None = None
    """Most turns of an episode, if the environment allows more. Where the environment's own limit depends on the task,
    the memory plan and dr-grpo's constant take the largest of eight tasks, unless this is set."""
    max_observation_len: Positive | None = None
    """Most tokens of a later observation; the rest is cut, and counted in the metric observation_cut_rate."""
    rollout_mode: Literal["parallel_per_turn", "sequential"] = "parallel_per_turn"
    """Decode many rows at once, or one at a time for the least memory."""
    use_chat_template: bool | None = None
    """Render prompts with the tokenizer's chat template; by default where it has one."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, for example {enable_thinking = false}; one that it never mentions is told."""

    quant_bits: Literal[4, 8, 16, 32] | None = None
    """Bits a weight that the model must have, where 16 and 32 both say that it is not quantized, whatever type its
    weights have; checked against the model, changes nothing."""
    adapter: str | None = None
    """Folder of an adapter to continue from; its rank, scale, kind and layers must be those of this config."""
    rank: Positive = 16
    """Rank of the LoRA adapter."""
    scale: Annotated[float, Field(gt=0)] = 2.0
    """Factor of the low-rank term; alpha / rank elsewhere."""
    rank_stabilized: bool = False
    """rsLoRA: divide alpha = scale * rank by the root of the rank, so that the factor is scale * sqrt(rank)."""
    use_dora: bool = False
    """DoRA: train the norms of the weights' rows beside their directions; not for the layers of experts."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Layers to adapt, by whole names of their paths in a row, with * for any text: "q_proj", "self_attn",
    "layers.3.mlp", "layers.*.mlp.switch_mlp". By default every linear layer of every block, experts included."""
    last_layers: Positive | None = None
    """Adapt only so many of the last blocks; by default all."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's inputs while a gradient is taken."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    checkpoint_granularity: Literal["per-layer"] = "per-layer"
    """What gradient checkpointing recomputes at a time."""
    iogpu_wired_limit_mb: Positive | None = None
    """Wired-memory limit to set on Metal, in MB; without it the limit is not touched. Inactive on other backends."""
    micro_batch_size: Positive | None = None
    """Most rows of one forward and backward pass, besides the token budget; changes no result."""

    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference; 0 runs no reference pass."""
    reference: Literal["base", "initial_adapter"] = "base"
    """What the KL is taken to: the base model, or the base with the adapter that the run continues from."""
    echo_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the world-model term on observation tokens; 0 switches it off."""
    echo_schedule: Literal["constant", "linear_taper_to_zero"] = "constant"
    """Course of echo_alpha over the steps."""
    echo_taper_steps: Positive | None = None
    """Steps until a tapering echo_alpha is 0."""

    optimizer: OptimizerConfig = OptimizerConfig()
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    update: UpdateConfig = UpdateConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig | None = None
    environment: dict[str, Any] = {}
    """[environment]: options of the environment."""
    rewards: tuple[RewardConfig, ...] = ()
    """[[rewards]]: reward functions; by default those of the environment."""
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        check_algorithm(self)
        if self.data is not None and self.env_name not in DATA_ENVIRONMENTS:
            raise ValueError(f"[data] is read by env_name = 'dataset' only, got env_name = {self.env_name!r}")
        if self.data is None and self.env_name in DATA_ENVIRONMENTS:
            raise ValueError(f"env_name = {self.env_name!r} needs [data] with a path; name the file of tasks")
        if self.reference == "initial_adapter" and self.adapter is None:
            raise ValueError(
                "reference = 'initial_adapter' needs adapter, the folder of the adapter that the run continues from; "
                "set it, or reference = 'base'"
            )
        if self.update.minibatches > self.groups_per_step * self.group_size:
            raise ValueError(
                f"update.minibatches = {self.update.minibatches} exceeds the "
                f"{self.groups_per_step * self.group_size} trajectories of a step; lower it or raise groups_per_step"
            )
        if self.echo_schedule == "linear_taper_to_zero" and self.echo_taper_steps is None:
            raise ValueError("echo_schedule = 'linear_taper_to_zero' needs echo_taper_steps; set the number of steps")
        if self.echo_schedule == "linear_taper_to_zero" and not self.echo_alpha:
            raise ValueError("echo_schedule = 'linear_taper_to_zero' has no effect on echo_alpha = 0; set echo_alpha")
        if self.echo_schedule == "constant" and self.echo_taper_steps is not None:
            raise ValueError(
                f"echo_taper_steps = {self.echo_taper_steps} has no effect on a constant schedule; "
                "set echo_schedule = 'linear_taper_to_zero' or leave it out"
            )
        if self.echo_alpha and self.rollout.context == "turn":
            raise ValueError(
                f"echo_alpha = {self.echo_alpha} has nothing to predict when rollout.context = 'turn', where every "
                "observation is a prompt; set rollout.context = 'transcript'"
            )
        if self.rollout.max_context is not None and self.rollout.max_context <= self.max_prompt_len:
            raise ValueError(
                f"rollout.max_context = {self.rollout.max_context} leaves no room for an action after a prompt of "
                f"max_prompt_len = {self.max_prompt_len} tokens; raise it or lower max_prompt_len"
            )
        if taken := ChatEncoder.RESERVED_KWARGS & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs.{sorted(taken)[0]} is set by the engine itself; leave it out")
        if self.chat_template_kwargs and self.use_chat_template is False:
            raise ValueError(
                f"chat_template_kwargs = {self.chat_template_kwargs} has no effect with use_chat_template = false; "
                "leave one of them out"
            )
        return self
