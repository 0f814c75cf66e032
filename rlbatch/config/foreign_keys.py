"""Keys and flags of other programs, and what says the same here: answers where they are typed, and tables of docs/use/migrating.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Ours(NamedTuple):
    """The key of rlbatch that says the same as another program's.

    Attributes:
        key: A config key, or ``none``.
        note: What differs, or why there is none; a sentence or two.
    """

    key: str
    note: str = ""


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_UPDATES = "Prompts a step over prompts an update: 256 prompts in mini-batches of 64 are 4."
_PACKS = "Samples are packed up to `train.max_tokens_per_gpu`, which changes no gradient."
_NODES = "Follows from `layout.world_size` and `cluster.gpus_per_node`."
_REWARD = "A file with a hook, `plugins=[my_reward.py]`, and `reward=<its name>`: docs/use/reward.md."
_LOGS = "TensorBoard events, samples and a summary are always in the run folder."
_FULL = "`full`, with `layout.recompute_method=uniform layout.recompute_num_layers=1`."
_LONG = "`drop` or `refuse`: a prompt that is too long is left out, or refuses the job; none is cut."
_ENGINE = "Times the data-parallel size of the engine."
_REF, _CRITIC = "The reference model has the policy's layout.", "There is no critic."
_OLD = "A name of older versions."
VERL: Mapping[str, Ours] = {
    "data.train_files": Ours("data.train", "As it is: its rows are known (data.format=verl)."),
    "data.val_files": Ours("eval.sets.<name>.file", "One key a file; or `data.eval`, one response a prompt."),
    "data.train_batch_size": Ours("train.prompts_per_step"),
    "data.max_prompt_length": Ours("data.max_prompt_tokens", "A longer prompt is left out or refused, never cut."),
    "data.max_response_length": Ours("rollout.max_response_tokens"),
    "data.filter_overlong_prompts": Ours("data.too_long", _LONG),
    "data.truncation": Ours("data.too_long", _LONG),
    "data.shuffle": Ours("none", "Always: each epoch in another order, which `seed` determines."),
    "data.reward_fn_key": Ours(
        "none", "A row may name its reward in a column, data.reward_key; all columns are in `sample.prompt.metadata`."
    ),
    "actor_rollout_ref.model.path": Ours("model.hf"),
    "actor_rollout_ref.model.use_remove_padding": Ours("none", _PACKS),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Ours("layout.recompute_granularity", _FULL),
    f"{_ACTOR}.optim.lr": Ours("optimizer.lr"),
    f"{_ACTOR}.optim.weight_decay": Ours("optimizer.weight_decay"),
    f"{_ACTOR}.optim.lr_warmup_steps": Ours("optimizer.lr_warmup_steps"),
    f"{_ACTOR}.ppo_mini_batch_size": Ours("train.updates_per_step", _UPDATES),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": Ours("none", _PACKS),
    f"{_ACTOR}.use_dynamic_bsz": Ours("none", _PACKS),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": Ours("train.max_tokens_per_gpu", "Times `layout.cp_size`."),
    f"{_ACTOR}.strategy": Ours("none", "Megatron-core always trains."),
    f"{_ACTOR}.grad_clip": Ours("optimizer.clip_grad"),
    f"{_ACTOR}.optim.clip_grad": Ours("optimizer.clip_grad"),
    f"{_ACTOR}.ppo_epochs": Ours("train.epochs"),
    f"{_ACTOR}.clip_ratio": Ours("algorithm.eps_clip", "And `algorithm.eps_clip_high`."),
    f"{_ACTOR}.clip_ratio_low": Ours("algorithm.eps_clip"),
    f"{_ACTOR}.clip_ratio_high": Ours("algorithm.eps_clip_high"),
    f"{_ACTOR}.clip_ratio_c": Ours("algorithm.loss_options.dual_clip", "Off by default."),
    f"{_ACTOR}.use_kl_loss": Ours("algorithm.kl_loss"),
    f"{_ACTOR}.kl_loss_coef": Ours("algorithm.kl_loss_coef"),
    f"{_ACTOR}.kl_loss_type": Ours("algorithm.kl_kind", "`k1` for kl, `k2` for mse."),
    f"{_ACTOR}.entropy_coeff": Ours("algorithm.entropy_coef"),
    f"{_ACTOR}.loss_agg_mode": Ours(
        "algorithm.loss_aggregation",
        "`token_mean` for token-mean, `sequence_mean` for seq-mean-token-mean, `sequence_sum` and `sequence_sum_norm` for the sums.",
    ),
    f"{_ACTOR}.loss_scale_factor": Ours("algorithm.loss_norm_constant", "By default `rollout.max_response_tokens`, not the padded width."),
    f"{_ACTOR}.policy_loss.loss_mode": Ours("algorithm.loss", "`clip` for vanilla, `gspo_token` for gspo."),
    f"{_ACTOR}.megatron.tensor_model_parallel_size": Ours("layout.tp_size"),
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": Ours("layout.pp_size"),
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": Ours("layout.vpp_size", "Chunks of a stage; 1: none."),
    f"{_ACTOR}.megatron.context_parallel_size": Ours("layout.cp_size"),
    f"{_ACTOR}.megatron.expert_model_parallel_size": Ours("layout.ep_size"),
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": Ours("layout.etp_size"),
    f"{_ACTOR}.megatron.optimizer_offload": Ours("offload.name", "`offload=optimizer_state`."),
    f"{_ACTOR}.megatron.grad_offload": Ours("offload.name", "`offload=gradients`."),
    f"{_ACTOR}.megatron.param_offload": Ours("offload.name", "`offload=weights`; with the others their option `weights`."),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": Ours("none", _PACKS),
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size": Ours("none", _REF),
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size": Ours("none", _REF),
    "actor_rollout_ref.ref.megatron.param_offload": Ours("none", "The reference model's weights are kept on the host."),
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": Ours("none", _PACKS),
    f"{_ROLLOUT}.mode": Ours("none", "A step generates, then trains."),
    f"{_ROLLOUT}.top_p": Ours("rollout.top_p"),
    f"{_ROLLOUT}.top_k": Ours("rollout.top_k", "0 (there -1): all tokens."),
    f"{_ROLLOUT}.val_kwargs.temperature": Ours(
        "eval.sets.<name>.temperature", "0: the most likely token. Of `data.eval` it is `train.eval_temperature`."
    ),
    f"{_ROLLOUT}.val_kwargs.top_p": Ours("eval.sets.<name>.top_p"),
    f"{_ROLLOUT}.val_kwargs.top_k": Ours("eval.sets.<name>.top_k", "0 for -1."),
    f"{_ROLLOUT}.val_kwargs.n": Ours("eval.sets.<name>.n"),
    f"{_ROLLOUT}.max_model_len": Ours("rollout.engine.max_model_len"),
    f"{_ROLLOUT}.max_num_batched_tokens": Ours("rollout.engine.max_num_batched_tokens"),
    f"{_ROLLOUT}.max_num_seqs": Ours("rollout.engine.max_num_seqs"),
    f"{_ROLLOUT}.enforce_eager": Ours("rollout.engine.enforce_eager"),
    f"{_ROLLOUT}.enable_chunked_prefill": Ours("rollout.engine.enable_chunked_prefill"),
    f"{_ROLLOUT}.data_parallel_size": Ours("rollout.engine.data_parallel_size"),
    f"{_ROLLOUT}.name": Ours("rollout.name"),
    f"{_ROLLOUT}.n": Ours("algorithm.group_size"),
    f"{_ROLLOUT}.temperature": Ours("rollout.temperature"),
    f"{_ROLLOUT}.tensor_model_parallel_size": Ours("rollout.options.gpus_per_engine", _ENGINE),
    f"{_ROLLOUT}.gpu_memory_utilization": Ours("rollout.engine.gpu_memory_utilization"),
    "algorithm.adv_estimator": Ours("algorithm.advantage"),
    "algorithm.filter_groups.enable": Ours("sampling.filters", "`[reward_spread]`; see docs/use/sampling.md."),
    "algorithm.filter_groups.max_num_gen_batches": Ours("sampling.max_rounds", "Then `sampling.on_shortage`."),
    "algorithm.use_kl_in_reward": Ours("algorithm.kl_reward_coef", "A coefficient above 0 switches it on."),
    "algorithm.kl_ctrl.kl_coef": Ours("algorithm.kl_reward_coef"),
    "algorithm.kl_penalty": Ours("algorithm.kl_kind"),
    "algorithm.norm_adv_by_std_in_grpo": Ours("algorithm.advantage", "`grpo` divides by the standard deviation, `dr_grpo` does not."),
    "algorithm.rollout_correction.rollout_is": Ours("correction.weights"),
    "algorithm.rollout_correction.rollout_is_threshold": Ours("correction.weight_high", "Of `0.5_5.0`: `band`, and two keys."),
    "algorithm.rollout_correction.rollout_rs": Ours(
        "correction.reject.k1_mean", "Or another rule: one key each; bounds on old over engine."
    ),
    "algorithm.rollout_correction.bypass_mode": Ours("algorithm.old_logprobs", "`rollout`."),
    "algorithm.gamma": Ours("algorithm.advantage_options.gamma", "Of `algorithm.advantage=reinforce_plus_plus`. There is no critic."),
    "algorithm.lam": Ours("none", _CRITIC),
    "custom_reward_function.path": Ours("plugins", _REWARD),
    "custom_reward_function.name": Ours("reward.name", _REWARD),
    "trainer.total_epochs": Ours("train.steps", "Epochs x prompts / `train.prompts_per_step`."),
    "trainer.total_training_steps": Ours("train.steps"),
    "trainer.n_gpus_per_node": Ours("cluster.gpus_per_node"),
    "trainer.nnodes": Ours("none", _NODES),
    "trainer.save_freq": Ours("checkpoint.save_interval"),
    "trainer.val_only": Ours("mode", "`eval`."),
    "trainer.test_freq": Ours("train.eval_interval", "0 for -1."),
    "trainer.val_before_train": Ours("none", "With `data.eval` there always is an evaluation before the first step."),
    "trainer.default_local_dir": Ours("checkpoint.save"),
    "trainer.resume_mode": Ours("resume", "`auto` or `never`."),
    "trainer.logger": Ours("trackers", "`trackers=[tensorboard,wandb]`; samples and a summary are always in the run folder."),
    "trainer.project_name": Ours("tracker_options", "`tracker_options.wandb.project`, `tracker_options.mlflow.experiment`."),
    "trainer.experiment_name": Ours("run_dir", "The run folder's name is the run's."),
    "trainer.rollout_data_dir": Ours("none", _LOGS),
    "trainer.log_val_generations": Ours("none", _LOGS),
    "trainer.max_actor_ckpt_to_keep": Ours("checkpoint.keep"),
    "trainer.critic_warmup": Ours("none", _CRITIC),
    "trainer.balance_batch": Ours("none", "Samples are always balanced over data-parallel ranks."),
    "trainer.device": Ours("none", "GPUs if there are any, else CPUs."),
}
SLIME: Mapping[str, Ours] = {
    "--prompt-data": Ours("data.train"),
    "--input-key": Ours("data.prompt_key"),
    "--label-key": Ours("data.label_key"),
    "--rollout-batch-size": Ours("train.prompts_per_step"),
    "--n-samples-per-prompt": Ours("algorithm.group_size"),
    "--dynamic-sampling-filter-path": Ours("sampling.filters", "`[reward_spread]`, or a hook of your own; see docs/use/sampling.md."),
    "--over-sampling-batch-size": Ours("sampling.oversampling", "A factor of `train.prompts_per_step`."),
    "--partial-rollout": Ours("sampling.partial_tokens", "A number of tokens."),
    "--mask-offpolicy-in-partial-rollout": Ours("sampling.old_tokens", "`mask`."),
    "--global-batch-size": Ours("train.updates_per_step", "Samples a step over samples an update."),
    "--num-rollout": Ours("train.steps"),
    "--rollout-max-response-len": Ours("rollout.max_response_tokens"),
    "--rollout-temperature": Ours("rollout.temperature"),
    "--eval-interval": Ours("train.eval_interval"),
    "--rm-type": Ours("reward.name", "The names are others: `python -m rlbatch.plugins` lists them."),
    "--custom-rm-path": Ours("plugins", _REWARD),
    "--lr": Ours("optimizer.lr"),
    "--lr-decay-style": Ours("optimizer.lr_schedule"),
    "--lr-warmup-iters": Ours("optimizer.lr_warmup_steps", "In steps, not updates."),
    "--weight-decay": Ours("optimizer.weight_decay"),
    "--adam-beta1": Ours("optimizer.beta1"),
    "--adam-beta2": Ours("optimizer.beta2"),
    "--clip-grad": Ours("optimizer.clip_grad"),
    "--num-epoch": Ours("train.steps", "Epochs x prompts / `train.prompts_per_step`."),
    "--eval-prompt-data": Ours("eval.sets.<name>.file", "One key a file, with its name in it."),
    "--n-samples-per-eval-prompt": Ours("eval.sets.<name>.n"),
    "--eval-temperature": Ours("eval.sets.<name>.temperature"),
    "--eval-top-p": Ours("eval.sets.<name>.top_p"),
    "--eval-max-response-len": Ours("eval.sets.<name>.max_response_tokens"),
    "--apply-chat-template": Ours("data.text_as_user", "Messages go through the template always; with this, texts do too."),
    "--rollout-shuffle": Ours("none", "Always: each epoch in another order, which `seed` determines."),
    "--balance-data": Ours("none", "Samples are always balanced over data-parallel ranks."),
    "--colocate": Ours("none", "Engines share the ranks' GPUs, unless `rollout.options.separate_gpus` says otherwise."),
    "--actor-num-nodes": Ours("none", _NODES),
    "--actor-num-gpus-per-node": Ours("cluster.gpus_per_node"),
    "--hf-checkpoint": Ours("model.hf"),
    "--ref-load": Ours("checkpoint.ref_load"),
    "--load": Ours("checkpoint.load"),
    "--save": Ours("checkpoint.save"),
    "--save-interval": Ours("checkpoint.save_interval"),
    "--tensor-model-parallel-size": Ours("layout.tp_size"),
    "--pipeline-model-parallel-size": Ours("layout.pp_size"),
    "--context-parallel-size": Ours("layout.cp_size"),
    "--expert-model-parallel-size": Ours("layout.ep_size"),
    "--expert-tensor-parallel-size": Ours("layout.etp_size"),
    "--max-tokens-per-gpu": Ours("train.max_tokens_per_gpu", "Times `layout.cp_size`."),
    "--advantage-estimator": Ours("algorithm.advantage"),
    "--use-kl-loss": Ours("algorithm.kl_loss"),
    "--kl-loss-coef": Ours("algorithm.kl_loss_coef"),
    "--kl-loss-type": Ours("algorithm.kl_kind"),
    "--kl-coef": Ours("algorithm.kl_reward_coef"),
    "--entropy-coef": Ours("algorithm.entropy_coef"),
    "--eps-clip": Ours("algorithm.eps_clip"),
    "--eps-clip-high": Ours("algorithm.eps_clip_high"),
    "--sequence-parallel": Ours("none", "Always on when `layout.tp_size` > 1."),
    "--decoder-first-pipeline-num-layers": Ours("layout.first_stage_layers"),
    "--decoder-last-pipeline-num-layers": Ours("layout.last_stage_layers"),
    "--recompute-granularity": Ours("layout.recompute_granularity"),
    "--recompute-method": Ours("layout.recompute_method"),
    "--recompute-num-layers": Ours("layout.recompute_num_layers"),
    "--recompute-modules": Ours("layout.recompute_modules", "Without `moe_act` and `core_attn`, which is what an empty list means."),
    "--offload-modules": Ours("layout.offload_modules", "`attention` and `experts`: all that autograd saves in them."),
    "--use-dynamic-batch-size": Ours("none", _PACKS),
    "--optimizer-cpu-offload": Ours("offload.name", "`offload=cpu_adam`. GPUs only."),
    "--moe-token-dispatcher-type": Ours("layout.dispatcher", "`auto`, `alltoall`, `gather` (its `allgather`, for uneven packs) or `flex`."),
    "--moe-enable-deepep": Ours("layout.deepep", "With `layout.dispatcher=flex` or `auto`."),
    "--vllm-gpu-memory-utilization": Ours("rollout.engine.gpu_memory_utilization"),
    "--vllm-data-parallel-size": Ours("rollout.engine.data_parallel_size"),
    "--vllm-enable-expert-parallel": Ours("rollout.engine.enable_expert_parallel"),
    "--rollout-num-gpus-per-engine": Ours("rollout.options.gpus_per_engine"),
}
OPENRLHF: Mapping[str, Ours] = {
    "--actor.model_name_or_path": Ours("model.hf"),
    "--data.prompt_dataset": Ours("data.train"),
    "--data.input_key": Ours("data.prompt_key"),
    "--data.label_key": Ours("data.label_key"),
    "--rollout.batch_size": Ours("train.prompts_per_step"),
    "--rollout.n_samples_per_prompt": Ours("algorithm.group_size"),
    "--rollout.max_new_tokens": Ours("rollout.max_response_tokens"),
    "--rollout.temperature": Ours("rollout.temperature"),
    "--train.batch_size": Ours("train.updates_per_step", "Samples a step over samples an update."),
    "--train.max_tokens_per_gpu": Ours("train.max_tokens_per_gpu"),
    "--actor.adam.lr": Ours("optimizer.lr"),
    "--actor.eps_clip": Ours("algorithm.eps_clip"),
    "--actor.entropy_coef": Ours("algorithm.entropy_coef"),
    "--algo.advantage.estimator": Ours("algorithm.advantage"),
    "--algo.kl.init_coef": Ours("algorithm.kl_reward_coef"),
    "--ckpt.path": Ours("checkpoint.save"),
    "--ckpt.save_steps": Ours("checkpoint.save_interval"),
    "--eval.steps": Ours("train.eval_interval"),
    "--vllm.tensor_parallel_size": Ours("rollout.options.gpus_per_engine"),
    "--vllm.gpu_memory_utilization": Ours("rollout.engine.gpu_memory_utilization"),
    "--pretrain": Ours("model.hf", _OLD),
    "--prompt_data": Ours("data.train", _OLD),
    "--rollout_batch_size": Ours("train.prompts_per_step", _OLD),
    "--n_samples_per_prompt": Ours("algorithm.group_size", _OLD),
    "--generate_max_len": Ours("rollout.max_response_tokens", _OLD),
    "--actor_learning_rate": Ours("optimizer.lr", _OLD),
    "--init_kl_coef": Ours("algorithm.kl_reward_coef", _OLD),
}
NEMO_RL: Mapping[str, Ours] = {
    "grpo.num_prompts_per_step": Ours("train.prompts_per_step"),
    "grpo.num_generations_per_prompt": Ours("algorithm.group_size"),
    "grpo.use_dynamic_sampling": Ours("sampling.filters", "`[reward_spread]`; see docs/use/sampling.md."),
    "grpo.batch_multiplier": Ours("sampling.oversampling"),
    "grpo.dynamic_sampling_max_gen_batches": Ours("sampling.max_rounds", "Then `sampling.on_shortage`."),
    "grpo.max_num_steps": Ours("train.steps"),
    "grpo.val_period": Ours("train.eval_interval"),
    "policy.model_name": Ours("model.hf"),
    "policy.generation.temperature": Ours("rollout.temperature"),
    "grpo.max_num_epochs": Ours("train.steps", "Epochs x prompts / `train.prompts_per_step`."),
    "grpo.seed": Ours("seed"),
    "grpo.use_leave_one_out_baseline": Ours("algorithm.advantage", "`rloo` leaves a sample out of its own baseline."),
    "policy.train_global_batch_size": Ours("train.updates_per_step", "Samples a step over samples an update."),
    "policy.precision": Ours("train.precision", "`bf16` or `fp32`."),
    "policy.max_grad_norm": Ours("optimizer.clip_grad"),
    "policy.sequence_packing.enabled": Ours("none", _PACKS),
    "policy.generation.backend": Ours("rollout.name"),
    "policy.generation.max_new_tokens": Ours("rollout.max_response_tokens"),
    "policy.generation.vllm_cfg.gpu_memory_utilization": Ours("rollout.engine.gpu_memory_utilization"),
    "policy.generation.vllm_cfg.tensor_parallel_size": Ours("rollout.options.gpus_per_engine", _ENGINE),
    "policy.megatron_cfg.tensor_model_parallel_size": Ours("layout.tp_size"),
    "policy.megatron_cfg.pipeline_model_parallel_size": Ours("layout.pp_size"),
    "policy.megatron_cfg.context_parallel_size": Ours("layout.cp_size"),
    "policy.megatron_cfg.expert_model_parallel_size": Ours("layout.ep_size"),
    "policy.megatron_cfg.optimizer.lr": Ours("optimizer.lr"),
    "loss_fn.token_level_loss": Ours("algorithm.loss_aggregation", "`token_mean` if true, `sequence_mean` if false."),
    "loss_fn.reference_policy_kl_penalty": Ours("algorithm.kl_loss_coef", "With `algorithm.kl_loss=true`."),
    "loss_fn.ratio_clip_min": Ours("algorithm.eps_clip"),
    "loss_fn.ratio_clip_max": Ours("algorithm.eps_clip_high"),
    "loss_fn.ratio_clip_c": Ours("algorithm.loss_options.dual_clip"),
    "cluster.num_nodes": Ours("none", _NODES),
    "checkpointing.save_period": Ours("checkpoint.save_interval"),
    "checkpointing.checkpoint_dir": Ours("checkpoint.save"),
    "checkpointing.keep_top_k": Ours("checkpoint.keep", "The newest; the best too, by a metric, with `checkpoint.best`."),
}
PROGRAMS: Mapping[str, Mapping[str, Ours]] = {"verl": VERL, "slime or vime": SLIME, "OpenRLHF": OPENRLHF, "NeMo-RL": NEMO_RL}


_SECTIONS = {
    "verl": ("actor_rollout_ref.", "trainer.", "critic.", "reward_model.", "custom_reward_function.", "ray_kwargs.", "ray_init."),
    "NeMo-RL": ("grpo.", "policy.", "loss_fn.", "checkpointing."),
}
"""Program -> beginnings that only its keys have."""


def answer(key: str) -> str:
    """Tells of which program a key is, and what says the same here, in two sentences; empty if the key is not known."""
    if key == "hydra.searchpath":
        return "Hydra's search path is not rlbatch's. Use cluster_dir=<folder> for clusters of your own."
    for is_meant in (str.__eq__, _is_by_habit):
        for program, table in PROGRAMS.items():
            ours = next((ours for name, ours in table.items() if is_meant(key, name)), None)
            if ours:
                said = f"Use {ours.key}." if ours.key != "none" else "Leave it out."
                return f"is {program}'s, not a key of rlbatch. {said} {ours.note}".replace("`", "").strip()
    for program, sections in _SECTIONS.items():
        if key.startswith(sections):
            return f"is {program}'s, not a key of rlbatch, and docs/use/migrating.md has none for it. Leave it out; --help lists rlbatch's."
    return ""


def _is_by_habit(key: str, name: str) -> bool:
    """Whether a key is a known flag with other dashes or none, or the end of one of verl's long keys, e.g. ``ppo_mini_batch_size``."""
    if name.startswith("--"):
        return key.lstrip("-").replace("_", "-") == name[2:].replace("_", "-")
    return name in VERL and name.endswith(f".{key}") and ("_" in key or "." in key)
