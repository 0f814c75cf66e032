"""Every config key, its unit and its default. The composed config is checked against these dataclasses; nothing else is a key.

``rollout``, ``reward`` and ``offload`` are config groups: ``rollout=transformers`` chooses a plugin, and the plugin's own options become
keys under the group's ``options`` (``reward.options.my_option``); those of the algorithm's under ``algorithm.advantage_options`` and
``algorithm.loss_options``, those of group filters under ``sampling.filter_options.<filter>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlbatch.api.values import INT32, INT64, Count, CountOrZero, FilePath, PathRule, Range, Seconds
from rlbatch.config.assumptions import PlanConfig
from rlbatch.config.keys import EMBEDDED, Band, OwnPath, Ranks, Scale, SourcePath, key
from rlbatch.config.machines import ClusterConfig, LaunchConfig

DEFAULT_PACK = 4096
"""Tokens of a pack where nothing says how many fit."""


@dataclass(frozen=True)
class TrainConfig:
    """``train.*``: how many steps of what size, and how their updates are computed."""

    steps: Count = key(100, "Steps of the run; each generates, scores and updates.")
    prompts_per_step: Annotated[int, Range(above=0, most=2**20)] = key(32, "Prompts (groups) a step.")
    updates_per_step: Count = key(1, "Optimizer updates a step; the step's groups are divided over them.")
    epochs: Count = key(
        1, "Passes over a step's samples; each makes updates_per_step updates, after the first of other groups, shuffled by the seed."
    )
    max_tokens_per_gpu: Count | Literal["auto"] = key(
        "auto",
        "Most tokens of a pack (x layout.cp_size): memory and speed, never the loss. A longer sample forms its own pack, untruncated. "
        f"auto: the most of 32768, 16384, 8192 that fit, chosen at submit; {DEFAULT_PACK} where cluster.gpu_memory_gib is not said.",
    )
    precision: Literal["fp32", "bf16"] = key("fp32", "Arithmetic of the trainer and the engine; bf16 keeps fp32 main weights.")
    eval_interval: CountOrZero = key(0, "Steps between held-out evaluations; 0: only before the first and after the last step.")
    eval_prompts: CountOrZero = key(128, "Held-out prompts of an evaluation, from the top of data.eval; 0: all.")
    eval_temperature: Scale = key(1.0, "Sampling temperature of evaluations; 0: the most likely token.")
    spec: Literal["auto", "local", "transformer_engine"] = key(
        "auto", "Megatron's layers: torch's own (local), or Transformer Engine's; auto: the latter on GPUs that have it installed."
    )
    kernels: Literal["auto", "torch"] = key(
        "auto",
        "On GPUs: this project's kernels of Triton, where it is installed and the GPU new enough; torch: torch's operations, slower.",
    )
    logprob_chunk_tokens: Count = key(4096, "Tokens whose logits exist at once; memory is chunk x vocabulary / tp_size.")
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop", "Where log-probs, loss or gradients are infinite or NaN: end the run, or go on without that update, and save nothing of it."
    )
    max_skipped_updates: CountOrZero = key(10, "With on_nonfinite=skip: most updates in a row that are left out; more end the run.")
    max_steps_without_signal: CountOrZero = key(
        10,
        "Steps in a row whose advantages are all 0 and whose reward is no better than ever before, after which the run ends; 0: no limit.",
    )
    allocator: Mapping[str, Any] = key(
        {}, "Options of torch's GPU allocator in the ranks, by its own names (max_split_size_mb, ...); not the engines'."
    )

    @property
    def pack_tokens(self) -> int:
        """``max_tokens_per_gpu`` in numbers, also before one is chosen."""
        return DEFAULT_PACK if self.max_tokens_per_gpu == "auto" else self.max_tokens_per_gpu


@dataclass(frozen=True)
class OptimizerConfig:
    """``optimizer.*``: Adam, as in Megatron's distributed optimizer."""

    name: Literal["adam"] = key("adam", "The optimizer.")
    lr: Scale = key(1e-6, "Peak learning rate.")
    min_lr: Scale = key(0.0, "Learning rate that the schedule decays to, one step after the last.")
    lr_schedule: Literal["constant", "linear", "cosine"] = key("constant", "Decay after the warm-up, over train.steps.")
    lr_warmup_steps: CountOrZero = key(0, "Steps (not updates) of linear warm-up from 0.")
    weight_decay: Scale = key(0.0, "Decoupled weight decay.")
    beta1: Annotated[float, Range(least=0, below=1)] = key(0.9, "Adam's first-moment decay.")
    beta2: Annotated[float, Range(least=0, below=1)] = key(0.95, "Adam's second-moment decay.")
    eps: Annotated[float, Range(least=1e-37, most=1e15)] = key(1e-8, "Adam's epsilon.")
    clip_grad: Scale = key(1.0, "Global gradient norm limit; 0: none.")


@dataclass(frozen=True)
class LayoutConfig:
    """``layout.*``: how the model is spread over ranks."""

    world_size: Ranks = key(2, "Ranks, one per GPU.")
    tp_size: Ranks = key(1, "Tensor parallel size of attention and dense layers (sequence parallel when > 1).")
    pp_size: Ranks = key(1, "Pipeline stages.")
    vpp_size: Ranks = key(
        1, "Model chunks of a pipeline stage; more than 1: interleaved pipeline, a smaller bubble for more communication."
    )
    cp_size: Ranks = key(1, "Context parallel size.")
    ep_size: Ranks = key(1, "Expert parallel size.")
    etp_size: Ranks = key(1, "Tensor parallel size of experts.")
    dispatcher: Literal["auto", "alltoall", "gather", "flex"] = key(
        "auto",
        "How tokens get to experts: once for each expert (alltoall), once for each rank (gather), or with DeepEP (flex); auto: gather "
        "while fewer ranks share the experts than a token has, else flex with layout.deepep=true, else alltoall.",
    )
    deepep: bool = key(False, "Move tokens between experts with DeepEP (needs layout.dispatcher=flex, or auto, and the deep_ep package).")
    first_stage_layers: Count | None = key(None, "Layers of the first pipeline stage; null: an equal share.")
    last_stage_layers: Count | None = key(None, "Layers of the last pipeline stage; null: an equal share.")
    recompute_granularity: Literal["full", "selective"] | None = key(None, "Activation recomputation; null: none.")
    recompute_method: Literal["uniform", "block"] | None = key(None, "With full recomputation: how layers are chosen.")
    recompute_num_layers: Count | None = key(None, "With full recomputation: layers of a chunk (uniform) or of a stage (block).")
    recompute_modules: tuple[Literal["layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"], ...] = key(
        (), "With selective recomputation: parts of a layer that are computed again; empty: attention's core."
    )
    offload_modules: tuple[Literal["attention", "experts"], ...] = key(
        (), "Parts of a layer whose activations go to the host after their forward pass, and come back for their backward pass."
    )
    overlap_grad_reduce: bool = key(
        False, "Reduce gradients over data-parallel ranks bucket by bucket, beside the last microbatch's backward pass, not after it."
    )


@dataclass(frozen=True)
class ModelConfig:
    """``model.*``: the model that is trained."""

    name: str = key("", "Name under which layouts are looked up, e.g. deepseek671b; `model=<name>` sets it.")
    parameters: Annotated[float, Range(least=0, most=1e15)] = key(
        0.0, "Parameters, e.g. 671.0e9: what a dry run goes by while model.hf is not there."
    )
    hf: SourcePath = key(EMBEDDED, "Hugging Face folder: config.json, tokenizer, safetensors; `embedded`: a tiny random Qwen3-MoE.")


@dataclass(frozen=True)
class RolloutConfig:
    """``rollout=<name>`` and ``rollout.*``"""

    name: str = key("transformers", "The rollout backend.")
    temperature: Annotated[float, Range(least=0.01, most=100)] = key(
        1.0, "Sampling temperature; log-probs are scored at it on both sides. At least 0.01: vLLM samples at no lower one."
    )
    top_p: Annotated[float, Range(above=0, most=1)] = key(
        1.0, "Below 1: tokens are chosen from the fewest, most likely first, whose probabilities reach it; log-probs are of these alone."
    )
    top_k: Annotated[int, Range(least=0, most=2**31 - 1)] = key(0, "Above 0: tokens are chosen from this many, the most likely.")
    max_response_tokens: Count = key(1024, "Limit of sampled tokens a sample.")
    sync_weights: bool = key(
        True, "Send the policy's weights to the engine before each step; false only to test that the log-prob check sees it."
    )
    max_logprob_diff: Annotated[float, Range(above=0, most=1e6)] | Literal["auto"] | None = key(
        None,
        "Largest accepted mean difference of trainer and engine log-probs, nats; beyond it the run ends. auto: 10 times what rounding of "
        "the weights does to this model, measured in the first step; null: only reported.",
    )
    bucket_mib: Annotated[int, Range(above=0, most=2**20)] = key(512, "MiB of a weight-sync bucket; a larger tensor travels alone.")
    audit_sync: Literal["first", "always", "off"] = key(
        "first",
        "Which syncs count that every parameter of the engine is written exactly once, and compare checksums of what its modules hold "
        "with the trainer's; first: also the first after a restart.",
    )
    audit_interval: CountOrZero = key(
        10, "Syncs from one comparison of the checksums to the next, beside those of audit_sync; 0: no others. None with audit_sync=off."
    )
    quantization: Literal["auto", "none", "fp8"] = key(
        "auto", "Weights of the engine: fp8 (e4m3 in blocks of 128 x 128, where the family has them), none, or auto: as in model.hf."
    )
    engine: Mapping[str, Any] = key(
        {}, "Options of the engine itself, by its own names, where it runs in a process of its own; also `python` and `environment`."
    )
    options: Mapping[str, Any] = key({}, "The backend's own options.")


@dataclass(frozen=True)
class RewardConfig:
    """``reward=<name>`` and ``reward.*``"""

    name: str = key("sequence", "The reward; a model of your own has none until one is named.")
    workers: Annotated[int, Range(above=0, most=1024)] | None = key(
        None, "Worker processes in which a rank's rewards run; null: its share of the node's CPUs."
    )
    timeout_s: Seconds | None = key(
        None, "Deadline of a call of a reward, for one sample or one group as it says, seconds; null: what the reward says, most 60."
    )
    on_error: Literal["zero", "drop_group", "stop"] = key(
        "stop", "A reward that raises, or returns what is no reward: it counts 0, its group is left out of the step, or the job stops."
    )
    on_timeout: Literal["zero", "drop_group", "stop"] | None = key(
        None, "The same of samples without a verdict: past timeout_s, or their worker died; null: what the reward says, most zero."
    )
    memory_gib: Annotated[float, Range(above=0, most=2**20)] | None = key(
        4.0, "Memory that a worker may take beside what its plugins have loaded; a call that needs more has no verdict. null: no limit."
    )
    options: Mapping[str, Any] = key({}, "The reward's own options.")


@dataclass(frozen=True)
class OffloadConfig:
    """``offload=<name>`` and ``offload.*``"""

    name: str = key("none", "The offload strategy.")
    options: Mapping[str, Any] = key({}, "The strategy's own options.")


@dataclass(frozen=True)
class AlgorithmConfig:
    """``algorithm.*``: advantages, the loss and its terms."""

    advantage: str = key("grpo", "The advantage estimator.")
    advantage_options: Mapping[str, Any] = key({}, "The estimator's own options.")
    loss: str = key("clip", "The policy loss.")
    loss_options: Mapping[str, Any] = key({}, "The loss's own options.")
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"] = key(
        "token_mean",
        "Mean over all sampled tokens of an update, or over sequences: of their tokens' mean, sum, or sum / loss_norm_constant.",
    )
    loss_norm_constant: Annotated[float, Range(above=0, most=1e9)] | None = key(
        None, "With sequence_sum_norm: what a sequence's sum is divided by; null: rollout.max_response_tokens."
    )
    group_size: Annotated[int, Range(above=0, most=2**20)] = key(8, "Samples a prompt.")
    eps_clip: Annotated[float, Range(above=0, below=1)] = key(0.2, "Lower clip range of the importance ratio.")
    eps_clip_high: Annotated[float, Range(above=0, most=1e15)] = key(0.2, "Upper clip range of the importance ratio.")
    kl_kind: Literal["k1", "abs", "k2", "k3", "low_var_kl"] = key("low_var_kl", "Estimator of the KL divergence to the reference model.")
    kl_loss: bool = key(False, "Measure the KL to the reference model and add kl_loss_coef x KL to the loss.")
    kl_loss_coef: Scale = key(0.0, "Coefficient of the KL in the loss; 0 with kl_loss=true only measures it.")
    kl_reward_coef: Scale = key(0.0, "Coefficient of the KL subtracted from the reward.")
    entropy_coef: Scale = key(0.0, "Coefficient of the entropy bonus.")
    mask_truncated: bool = key(
        False, "Leave responses that the length limit cut out of the loss, of its denominator and of their group's statistics."
    )
    overlong_penalty: Scale = key(0.0, "What a response of full length loses of its reward (DAPO's soft overlong penalty: 1.0); 0: none.")
    overlong_buffer_tokens: Count | None = key(
        None, "With overlong_penalty: over how many tokens before rollout.max_response_tokens it grows from 0; null: a fifth of them."
    )
    routing_replay: Literal["none", "recorded", "rollout"] = key(
        "none",
        "Whose experts the trainer's tokens go to: its routers choose; in updates those of the pass for old log-probs; the engine's.",
    )
    old_logprobs: Literal["recompute", "rollout"] = key(
        "recompute", "Old log-probs: the trainer's (the first update's own forward pass, one for later ones' samples), or the engine's."
    )


@dataclass(frozen=True)
class RejectConfig:
    """``correction.reject.*``: bounds of ``k1``: on old over engine's probability; of ``k2`` and ``k3``: the largest value."""

    k1_token: Band = key(None, "[low,high] of a token's ratio; the token is rejected.")
    k1_max: Band = key(None, "[low,high] of each token's ratio; else the sequence is rejected, as by all keys below.")
    k1_mean: Band = key(None, "[low,high] of the geometric mean of a sequence's ratios, e.g. [0.99,1.01].")
    k1_sum: Band = key(None, "[low,high] of a sequence's ratio, the product over its tokens.")
    k2_token: Scale | None = key(None, "Most of a token's k2 = log(ratio)^2 / 2; the token is rejected.")
    k2_max: Scale | None = key(None, "Most of any token's k2.")
    k2_mean: Scale | None = key(None, "Most of the mean of a sequence's k2.")
    k2_sum: Scale | None = key(None, "Most of the sum of a sequence's k2.")
    k3_token: Scale | None = key(None, "Most of a token's k3 = ratio - 1 - log(ratio); the token is rejected.")
    k3_max: Scale | None = key(None, "Most of any token's k3.")
    k3_mean: Scale | None = key(None, "Most of the mean of a sequence's k3, e.g. 0.01.")
    k3_sum: Scale | None = key(None, "Most of the sum of a sequence's k3.")


@dataclass(frozen=True)
class CorrectionConfig:
    """``correction.*``: of what engine and trainer disagree on, before the first update. Off by default."""

    weights: Literal["none", "token", "sequence"] = key(
        "none", "Multiply the policy loss with old over engine's probability, of each token or of the whole response."
    )
    weight_limit: Literal["truncate", "band", "raw"] = key(
        "truncate", "Weights: at most weight_high, 0 outside [weight_low, weight_high] (IcePop), or as they are."
    )
    weight_low: Scale | None = key(None, "Lower bound of weight_limit=band, e.g. 0.5.")
    weight_high: Annotated[float, Range(above=0, most=1e15)] | None = key(None, "Upper bound of weights, e.g. 2.0.")
    reject: RejectConfig = field(default_factory=RejectConfig)
    veto: Annotated[float, Range(above=0, below=1)] | None = key(
        None, "Reject a sequence if the ratio of any of its tokens is below this, e.g. 1e-4."
    )
    opsm_delta: Scale | None = key(
        None, "Reject tokens of negative advantage where the mean of engine's less old log-prob of the sequence is above this, e.g. 1e-4."
    )
    denominator: Literal["all", "kept"] = key("all", "Mean of the policy loss over what was there before rejection, or over what is kept.")


RowFormat = Literal["auto", "plain", "verl", "slime", "openrlhf"]
"""Programs whose names of columns the rows have."""


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """How the rows of one of several sets are read. What is null is as ``data.*`` says."""

    format: RowFormat | None = key(None, "As data.format.")
    prompt_key: str | None = key(None, "As data.prompt_key.")
    label_key: str | None = key(None, "As data.label_key.")
    reward_key: str | None = key(None, "As data.reward_key.")
    text_as_user: bool | None = key(None, "As data.text_as_user.")
    system_prompt: str | None = key(None, "As data.system_prompt.")
    template_options: Mapping[str, Any] | None = key(None, "As data.template_options.")


@dataclass(frozen=True)
class DataSetConfig(RowsConfig):
    """``data.sets.<name>.*``: one of several training sets."""

    path: SourcePath | tuple[SourcePath, ...] = key("", "As data.train.")
    weight: Annotated[float, Range(above=0, most=1e9)] | None = key(
        None, "Its share of the prompts, relative to the other sets' weights; null, of all sets: its number of rows."
    )
    reward: str = key("", "Reward of its rows that name none; empty: the job's.")


@dataclass(frozen=True)
class SamplingConfig:
    """``sampling.*``: which groups a step trains on. By default those of its first ``train.prompts_per_step`` prompts, whole."""

    filters: tuple[str, ...] = key((), "Filters of whole groups, in order, e.g. [reward_spread]: a group that one refuses is dropped.")
    filter_options: Mapping[str, Any] = key({}, "The filters' own options: sampling.filter_options.<filter>.<option>.")
    oversampling: Annotated[float, Range(least=1, most=1000)] = key(
        1.0, "New prompts of a round for each group that is missing; accepted groups beyond the step's wait for the next one."
    )
    max_rounds: Count = key(10, "Rounds of new prompts in a step; what is missing then is sampling.on_shortage's.")
    on_shortage: Literal["train", "skip", "stop"] = key(
        "train", "Too few groups after the last round: train on those that are there, make no update and keep them, or end the run."
    )
    max_version_lag: CountOrZero | None = key(
        None, "Most optimizer updates between the policy that sampled a token and the step's own; null: those of 4 steps."
    )
    partial_tokens: CountOrZero = key(
        0,
        "Responses are sampled in parts of so many tokens; once there are enough groups, what is not finished goes on in the next step, by "
        "its policy. 0: to their end. Best a divisor of rollout.max_response_tokens; needs sampling.oversampling.",
    )
    old_tokens: Literal["keep", "mask"] = key(
        "keep", "Tokens that an earlier policy sampled: train on them as on others, or leave them out of the loss."
    )


@dataclass(frozen=True)
class DataConfig:
    """``data.*``: the prompt files and how their rows are read."""

    train: SourcePath | tuple[SourcePath, ...] = key(
        EMBEDDED,
        "Training prompts: a file (jsonl, also .gz or .zst, or parquet), a folder of such, a pattern such as 'part-*.parquet', or a list.",
    )
    eval: SourcePath | tuple[SourcePath, ...] = key(EMBEDDED, "Held-out prompts, as data.train; empty: no evaluation.")
    sets: Mapping[str, DataSetConfig] = key(
        {},
        "Several training sets, in place of data.train: data.sets.<name>.path=..., and weight, reward, format, *_key, text_as_user, "
        "system_prompt, template_options of each.",
    )
    format: RowFormat = key(
        "auto",
        "Columns of prompt and label: plain or slime (prompt, label), verl (prompt, reward_model.ground_truth), openrlhf (input, "
        "label); auto: the first of these that a row has. slime reads numbers in labels as text.",
    )
    prompt_key: str | None = key(
        None, "Column with the prompt: a string, or a list of {role, content}; dots lead into objects; null: by data.format."
    )
    label_key: str | None = key(None, "Column with what the reward compares with; null: by data.format; empty: there is none.")
    reward_key: str = key("reward", "Column with the name of a row's own reward, which it need not have; empty: none.")
    metadata_keys: tuple[str, ...] | None = key(
        None, "Other columns that are read, into sample.prompt.metadata; null: all. Of parquet files no others are read from disk."
    )
    text_as_user: bool = key(False, "Put prompts that are strings through the chat template too, as a user's message.")
    system_prompt: str = key("", "System message before the messages of rows that have none.")
    template_options: Mapping[str, Any] = key(
        {}, "Arguments of the chat template by its own names, e.g. data.template_options.enable_thinking=false."
    )
    add_special_tokens: bool = key(
        True, "Of prompts that are strings: with the tokens that the tokenizer adds by itself, e.g. a BOS, which is never doubled."
    )
    special_tokens: Literal["keep", "text", "refuse"] = key(
        "keep",
        "Where a row's own text spells a special token, e.g. <|im_end|>: it is that token, it is its letters, or the row is refused.",
    )
    max_prompt_tokens: Count | None = key(None, "Longest prompt; null: the context less rollout.max_response_tokens.")
    too_long: Literal["drop", "refuse"] = key("drop", "Longer prompts are left out and counted, or the job is refused.")
    curriculum: str = key(
        "", "Column by whose values, ascending, each epoch of a set is ordered (equal ones are shuffled); empty: all are shuffled."
    )


@dataclass(frozen=True)
class EvalSetConfig(RowsConfig):
    """``eval.sets.<name>.*``: held-out prompts with settings of their own."""

    file: SourcePath | tuple[SourcePath, ...] = key("", "Prompts, as data.eval.")
    prompts: CountOrZero = key(0, "Its prompts that an evaluation takes, from the top; 0: all.")
    reward: str = key("", "Reward of its rows that name none; empty: the job's.")
    reward_options: Mapping[str, Any] = key({}, "Options of that reward.")
    n: Annotated[int, Range(above=0, most=2**20)] = key(1, "Samples a prompt.")
    k: tuple[Count, ...] = key((), "The k of pass@k and majority@k, at most n; empty: the powers of 2 up to n.")
    correct: Annotated[float, Range(least=-1e6, most=1e6)] = key(
        1.0, "A response with at least this reward counts as correct, for pass@k and majority@k."
    )
    temperature: Scale = key(1.0, "Sampling temperature; 0: the most likely token.")
    top_p: Annotated[float, Range(above=0, most=1)] = key(1.0, "Samples from the likeliest tokens that have this probability together.")
    top_k: CountOrZero = key(0, "Samples from so many likeliest tokens; 0: from all.")
    max_response_tokens: Count | None = key(None, "Limit of sampled tokens a sample; null: rollout.max_response_tokens.")


@dataclass(frozen=True)
class EvalConfig:
    """``eval.*``: which sets of held-out prompts are evaluated, and when."""

    sets: Mapping[str, EvalSetConfig] = key({}, "Sets of held-out prompts by names of your own, evaluated when data.eval is.")


@dataclass(frozen=True)
class CheckpointConfig:
    """``checkpoint.*``: when checkpoints are written, where, and which are kept."""

    load: FilePath = key(
        "", "Where the policy's weights come from: a run's checkpoint (.../step_000100) or a Hugging Face folder; empty: ref_load."
    )
    ref_load: FilePath = key("", "Where the reference model's weights come from: as checkpoint.load; empty: model.hf.")
    save: FilePath = key("", "Folder of checkpoints; empty: <run_dir>/checkpoints.")
    save_interval: Annotated[int, Range(least=-1, most=INT32)] = key(
        0, "Steps between checkpoints; 0: only after the last step; -1: never."
    )
    export_hf: bool = key(False, "After the last step, write the policy as a Hugging Face folder: <run_dir>/hf.")
    export_interval: CountOrZero = key(0, "With export_hf: steps between exports before the last step, <run_dir>/hf_step_<step>; 0: none.")
    export_dtype: Literal["auto", "bf16", "fp8"] = key(
        "auto", "Of an export's weights: bf16, fp8 (e4m3 in blocks of 128 x 128, where the model family has them), auto: as in model.hf."
    )
    keep: CountOrZero = key(2, "Newest checkpoints of this run to keep; its older ones are deleted once a new one is complete. 0: all.")
    best: str = key(
        "", "Metric of an evaluation, e.g. eval/aime/avg@32: the checkpoint with the highest is kept beside `keep`; best.json names it."
    )
    async_save: bool = key(False, "Write checkpoints while training goes on, from a copy in host memory.")


@dataclass(frozen=True)
class ProfileConfig:
    """``profile.*``: where the time or the memory of some steps goes, into <run_dir>/profile."""

    kind: Literal["none", "torch", "memory", "nsys"] = key(
        "none", "torch: a time line and a table by phase and module; memory: every allocation on a GPU; nsys: for Nsight Systems."
    )
    steps: tuple[Count, ...] = key((3,), "Steps that are profiled. The first ones hold compilation and the first sync.")
    ranks: tuple[CountOrZero, ...] = key((0,), "Ranks that are profiled.")
    owners: bool = key(
        True, "Keep which line of code asked for GPU memory that is in use, to be named where it runs out; torch says 2 us each."
    )


@dataclass(frozen=True)
class Config:
    """The whole config."""

    seed: Annotated[int, Range(least=0, most=INT64)] = key(0, "Determines weights of the embedded model, prompt order and every sample.")
    run_dir: OwnPath = key("", "Run folder; empty: runs/<time>.")
    resume: Literal["never", "auto"] = key("never", "`auto`: go on from the newest checkpoint in checkpoint.save, if there is one.")
    plugins: tuple[Annotated[str, PathRule(suffix=".py")], ...] = key((), "Extra plugins: python files or importable modules.")
    cluster_dir: OwnPath = key("", "Folder with files of your own for `+cluster=<name>`; empty: those of configs/cluster alone.")
    launcher: Literal["local", "slurm", "mpi", "none"] = key(
        "local",
        "Who starts the ranks: this machine, Slurm (submitit), mpirun; none: only the run folder is written, a batch script starts them.",
    )
    trackers: tuple[str, ...] = key(("tensorboard",), "What takes metrics, and samples if it can, beside the run folder's own files.")
    tracker_options: Mapping[str, Any] = key({}, "Each tracker's own options, e.g. tracker_options.wandb.project=rl; never a secret.")
    mode: Literal["train", "eval"] = key("train", "`eval`: only evaluate checkpoint.load (or model.hf), without an optimizer's memory.")
    dry_run: bool = key(False, "Print exactly what would run, and start nothing.")
    follow: bool = key(False, "After submitting, show the job's log until it ends.")
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
