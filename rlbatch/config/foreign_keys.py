"""Keys and flags of other programs, and what says the same here: an answer where they are typed, and the tables of docs/migrating.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Ours(NamedTuple):
    """What says the same here.

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
_REWARD = "A file with a hook, `plugins=[my_reward.py]`, and `reward=<its name>`: docs/plugins.md."
_LOGS = "TensorBoard events, samples and a summary are always in the run folder."
VERL: Mapping[str, Ours] = {
    "data.train_files": Ours("data.train", "One jsonl file; parquet must be converted."),
    "data.val_files": Ours("data.eval", "One jsonl file."),
    "data.train_batch_size": Ours("train.prompts_per_step"),
    "data.max_prompt_length": Ours("data.max_prompt_tokens", "A longer prompt is refused, not cut."),
    "data.max_response_length": Ours("rollout.max_response_tokens"),
    "actor_rollout_ref.model.path": Ours("model.hf"),
    f"{_ACTOR}.optim.lr": Ours("optimizer.lr"),
    f"{_ACTOR}.optim.weight_decay": Ours("optimizer.weight_decay"),
    f"{_ACTOR}.optim.lr_warmup_steps": Ours("optimizer.lr_warmup_steps"),
    f"{_ACTOR}.ppo_mini_batch_size": Ours("train.updates_per_step", _UPDATES),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": Ours("none", _PACKS),
    f"{_ACTOR}.use_dynamic_bsz": Ours("none", _PACKS),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": Ours("train.max_tokens_per_gpu", "Times `layout.cp_size`."),
    f"{_ACTOR}.ppo_epochs": Ours("none", "Each sample is trained on once."),
    f"{_ACTOR}.clip_ratio": Ours("algorithm.eps_clip", "And `algorithm.eps_clip_high`."),
    f"{_ACTOR}.clip_ratio_low": Ours("algorithm.eps_clip"),
    f"{_ACTOR}.clip_ratio_high": Ours("algorithm.eps_clip_high"),
    f"{_ACTOR}.use_kl_loss": Ours("algorithm.kl_loss"),
    f"{_ACTOR}.kl_loss_coef": Ours("algorithm.kl_loss_coef"),
    f"{_ACTOR}.kl_loss_type": Ours("algorithm.kl_kind"),
    f"{_ACTOR}.entropy_coeff": Ours("algorithm.entropy_coef"),
    f"{_ACTOR}.loss_agg_mode": Ours("algorithm.loss_aggregation"),
    f"{_ACTOR}.megatron.tensor_model_parallel_size": Ours("layout.tp_size"),
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": Ours("layout.pp_size"),
    f"{_ACTOR}.megatron.context_parallel_size": Ours("layout.cp_size"),
    f"{_ACTOR}.megatron.expert_model_parallel_size": Ours("layout.ep_size"),
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": Ours("layout.etp_size"),
    f"{_ROLLOUT}.name": Ours("rollout.name"),
    f"{_ROLLOUT}.n": Ours("algorithm.group_size"),
    f"{_ROLLOUT}.temperature": Ours("rollout.temperature"),
    f"{_ROLLOUT}.tensor_model_parallel_size": Ours("rollout.options.gpus_per_engine", "Times the data-parallel size of the engine."),
    f"{_ROLLOUT}.gpu_memory_utilization": Ours("rollout.engine.gpu_memory_utilization"),
    "algorithm.adv_estimator": Ours("algorithm.advantage"),
    "algorithm.use_kl_in_reward": Ours("algorithm.kl_reward_coef", "A coefficient above 0 switches it on."),
    "algorithm.kl_ctrl.kl_coef": Ours("algorithm.kl_reward_coef"),
    "custom_reward_function.path": Ours("plugins", _REWARD),
    "custom_reward_function.name": Ours("reward.name", _REWARD),
    "trainer.total_epochs": Ours("train.steps", "Epochs x prompts / `train.prompts_per_step`."),
    "trainer.total_training_steps": Ours("train.steps"),
    "trainer.n_gpus_per_node": Ours("cluster.gpus_per_node"),
    "trainer.nnodes": Ours("none", _NODES),
    "trainer.save_freq": Ours("checkpoint.save_interval"),
    "trainer.test_freq": Ours("train.eval_interval"),
    "trainer.val_before_train": Ours("none", "With `data.eval` there always is an evaluation before the first step."),
    "trainer.default_local_dir": Ours("checkpoint.save"),
    "trainer.resume_mode": Ours("resume", "`auto` or `never`."),
    "trainer.logger": Ours("none", _LOGS),
    "trainer.project_name": Ours("none", _LOGS),
    "trainer.experiment_name": Ours("run_dir", "The run folder's name is the run's."),
}
SLIME: Mapping[str, Ours] = {
    "--prompt-data": Ours("data.train"),
    "--input-key": Ours("data.prompt_key"),
    "--label-key": Ours("data.label_key"),
    "--rollout-batch-size": Ours("train.prompts_per_step"),
    "--n-samples-per-prompt": Ours("algorithm.group_size"),
    "--global-batch-size": Ours("train.updates_per_step", "Samples a step over samples an update."),
    "--num-rollout": Ours("train.steps"),
    "--rollout-max-response-len": Ours("rollout.max_response_tokens"),
    "--rollout-temperature": Ours("rollout.temperature"),
    "--eval-interval": Ours("train.eval_interval"),
    "--rm-type": Ours("reward.name", "The names are others: `python -m rlbatch.plugins` lists them."),
    "--custom-rm-path": Ours("plugins", _REWARD),
    "--lr": Ours("optimizer.lr"),
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
    "--rollout-num-gpus-per-engine": Ours("rollout.options.gpus_per_engine"),
}
OPENRLHF: Mapping[str, Ours] = {
    "--actor.model_name_or_path": Ours("model.hf"),
    "--data.prompt_dataset": Ours("data.train", "A jsonl file."),
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
    "--pretrain": Ours("model.hf", "In its older versions."),
    "--prompt_data": Ours("data.train", "In its older versions. A jsonl file."),
    "--rollout_batch_size": Ours("train.prompts_per_step", "In its older versions."),
    "--n_samples_per_prompt": Ours("algorithm.group_size", "In its older versions."),
    "--generate_max_len": Ours("rollout.max_response_tokens", "In its older versions."),
    "--actor_learning_rate": Ours("optimizer.lr", "In its older versions."),
    "--init_kl_coef": Ours("algorithm.kl_reward_coef", "In its older versions."),
}
NEMO_RL: Mapping[str, Ours] = {
    "grpo.num_prompts_per_step": Ours("train.prompts_per_step"),
    "grpo.num_generations_per_prompt": Ours("algorithm.group_size"),
    "grpo.max_num_steps": Ours("train.steps"),
    "grpo.val_period": Ours("train.eval_interval"),
    "policy.model_name": Ours("model.hf"),
    "policy.generation.temperature": Ours("rollout.temperature"),
    "loss_fn.reference_policy_kl_penalty": Ours("algorithm.kl_loss_coef", "With `algorithm.kl_loss=true`."),
    "loss_fn.ratio_clip_min": Ours("algorithm.eps_clip"),
    "loss_fn.ratio_clip_max": Ours("algorithm.eps_clip_high"),
    "cluster.num_nodes": Ours("none", _NODES),
    "checkpointing.save_period": Ours("checkpoint.save_interval"),
    "checkpointing.checkpoint_dir": Ours("checkpoint.save"),
}
PROGRAMS: Mapping[str, Mapping[str, Ours]] = {"verl": VERL, "slime or vime": SLIME, "OpenRLHF": OPENRLHF, "NeMo-RL": NEMO_RL}


def answer(key: str) -> str:
    """Whose key it is and what says the same here, two sentences; empty: not known."""
    if key == "hydra.searchpath":
        return "Hydra's search path is not rlbatch's. Use cluster_dir=<folder> for clusters of your own."
    for program, table in PROGRAMS.items():
        ours = table.get(key) or next((ours for name, ours in table.items() if program == "verl" and _is_end(key, name)), None)
        if ours:
            said = f"Use {ours.key}." if ours.key != "none" else "Leave it out."
            return f"is {program}'s, not a key of rlbatch. {said} {ours.note}".replace("`", "").strip()
    return ""


def _is_end(key: str, name: str) -> bool:
    """Whether a key is the end of verl's long ones, e.g. ``ppo_mini_batch_size``."""
    return name.startswith("actor_rollout_ref.") and name.endswith(f".{key}") and ("_" in key or "." in key)
