"""For every config key: values that a run must tell apart, and what else must be set; for test_every_key_acts.py."""

from __future__ import annotations

import typing
from typing import NamedTuple

from optim.config import OPTIONS, Role

# A run of a third of a second that goes through everything. Paths are those of the run's own folder.
BASE = """
run: {name: base}
model: {n_layers: 2, d_model: 16, n_heads: 2, d_ff: 32, max_seq_len: 32}
data: {corpus: inputs/corpus.jsonl, tokenizer: {vocab_size: 300}, seq_len: 16}
optim: {lr: 1.0e-2}
train: {steps: 2, global_batch_size: 4, micro_batch_size: 2}
eval: {batches: 1}
"""
UNSET = ""  # the key is not given, and has its value in BASE or its default
ALL = ()  # every value of a boolean or of a list of words; a new word joins by itself


class Change(NamedTuple):
    """Values of one key, each of which must give another run than the others, all else being equal."""

    values: tuple[str, ...] = ALL
    needs: tuple[str, ...] = ()  # other overrides, the same for all values
    world: int = 1  # ranks
    earlier: tuple[str, ...] | None = None  # overrides of a start before; the run that is looked at goes on from it


def to(value: str, *needs: str, world: int = 1) -> Change:
    """A change from what BASE has."""
    return Change((UNSET, value), needs, world)


def between(*values: str, needs: tuple[str, ...] = ()) -> Change:
    """A change between given values, where the default is null and stands for something else."""
    return Change(values, needs)


SHAMPOO = ("optim.name=shampoo", "train.steps=3")
SPIKES = ("train.spike_score=0.01", "train.steps=40", "checkpoint.every=33", "optim.lr=1e-9")
MOE = ("model.moe={n_experts: 4, d_ff: 16}",)
# Of each kind, the keys that belong to it.
ROPE_SCALING: dict[str, dict[str, tuple[str, str]]] = {
    "{kind: linear, factor: 2}": {"factor": ("2", "4")},
    "{kind: llama3, factor: 8, original_max_seq_len: 128}": {
        "kind": ("llama3", "yarn"),
        "original_max_seq_len": ("128", "32"),
        "low_freq_factor": ("1", "2"),
        "high_freq_factor": ("4", "16"),
    },
    "{kind: yarn, factor: 8, original_max_seq_len: 4096}": {
        "beta_fast": ("32", "4"),
        "beta_slow": ("1", "0.25"),
        "truncate": ("true", "false"),
        "attention_factor": ("1", "2"),
    },
}

CHANGES: dict[str, Change] = {
    "run.name": to("other"),
    "run.dir": to("elsewhere"),
    "run.seed": to("1"),
    "model.preset": to("llama-1m"),  # of what it holds, BASE leaves tie_embeddings and init_std to it
    "model.init_from": between("inputs/weights-a", "inputs/weights-b"),
    "model.vocab_size": between("300", "320"),
    "model.n_layers": to("1"),
    "model.d_model": to("32"),
    "model.n_heads": to("4"),
    "model.n_kv_heads": between("2", "1"),
    "model.head_dim": between("8", "4"),
    "model.d_ff": to("48"),
    "model.max_seq_len": to("48", "model.position=learned"),
    "model.norm": Change(ALL),
    "model.norm_eps": to("1e-2"),
    "model.norm_bias": Change(ALL),
    "model.norm_unit_offset": Change(ALL),  # the weights start elsewhere
    "model.norm_placement": Change(ALL),
    "model.final_norm": Change(ALL),
    "model.activation": Change(ALL),
    "model.activation_limit": between("7", "1e-3", needs=("model.activation=swiglu_clamped",)),
    "model.position": Change(ALL),
    "model.rope_theta": to("10"),
    "model.rope_theta_local": between("10000", "10", needs=("model.attention_window=8",)),
    "model.rope_scaling": between("null", "{kind: linear, factor: 2}"),
    **{
        f"model.rope_scaling.{key}": between(first, second, needs=(f"model.rope_scaling={section}",))
        for section, keys in ROPE_SCALING.items()
        for key, (first, second) in keys.items()
    },
    "model.rope_fraction": to("0.5"),
    "model.relative_clip": to("3", "model.position=relative"),
    "model.scale_embedding": Change(ALL),
    "model.tie_embeddings": Change(ALL),
    "model.attention_bias": Change(ALL),
    "model.attention_out_bias": between("true", "false"),
    "model.attention_scale": between("1", "2"),
    "model.attention_softcap": between("1", "2"),
    "model.attention_sinks": Change(ALL),
    "model.attention_window": between("null", "4", "8"),
    "model.attention_global_every": between("null", "2", needs=("model.attention_window=4",)),
    "model.mlp_bias": Change(ALL),
    "model.qk_norm": Change(ALL),
    "model.logit_softcap": between("null", "1"),
    "model.moe": between("null", "{}"),
    "model.moe.n_experts": between("4", "8", needs=MOE),
    "model.moe.top_k": between("2", "3", needs=MOE),
    "model.moe.d_ff": between("16", "24", needs=MOE),
    "model.moe.router": Change(ALL, MOE),
    "model.moe.router_bias": Change(ALL, MOE),
    "model.moe.selection_bias": Change(ALL, MOE),
    "model.moe.normalize": Change(ALL, MOE),
    "model.moe.routed_scale": between("1", "2", needs=MOE),
    "model.moe.n_shared_experts": between("0", "1", needs=MOE),
    "model.moe.n_dense_layers": between("0", "1", needs=MOE),
    "model.moe.capacity_factor": between("null", "0.5", needs=MOE),
    "model.moe.bias_update_rate": between("0.001", "0.003", needs=MOE),
    "model.moe.aux_loss_over": Change(ALL, MOE),
    "model.moe.aux_loss_coef": between("0", "0.1", needs=MOE),
    "model.moe.z_loss_coef": between("0", "0.1", needs=MOE),
    "model.init_std": to("0.1"),
    "model.mup_base_width": between("16", "4"),
    "data.corpus": to("inputs/other.jsonl"),
    "data.text_field": to("title"),
    "data.tokenizer.vocab_size": to("320"),
    "data.tokenizer.model": Change(ALL),
    "data.tokenizer.path": between(
        "inputs/one.json", "inputs/two.json", needs=("data.tokenizer={path: inputs/one.json}",)
    ),
    "data.tokenizer.eos": between(
        "<|endoftext|>", "<|user|>", needs=("data.tokenizer={path: inputs/one.json, eos: <|user|>}",)
    ),
    "data.path": between("inputs/a", "inputs/b", needs=("data={path: inputs/a, seq_len: 16}",)),
    "data.mixture": between(
        "[{path: inputs/a, weight: 1}, {path: inputs/b, weight: 1}]",
        "[{path: inputs/a, weight: 1}, {path: inputs/b, weight: 3}]",
        needs=("data={mixture: [{path: inputs/a, weight: 1}], seq_len: 16}",),
    ),
    "data.document_mask": Change(ALL),
    "data.shuffle.block": to("2"),
    "data.shuffle.window": between("1", "4", needs=("data.shuffle.block=2",)),
    "data.seq_len": to("8"),
    "data.packing": Change(ALL),
    "data.eval_fraction": to("0.3"),
    "data.dtype": between("uint16", "int32"),  # auto is one of them
    "data.cache_dir": between("one", "two"),
    "optim.name": Change(tuple(OPTIONS), ("optim.weight_decay=0.5",)),
    "optim.lr": to("2e-2"),
    "optim.weight_decay": to("0.5"),
    "optim.betas": between("[0.9, 0.95]", "[0.8, 0.95]", "[0.9, 0.8]"),
    "optim.eps": between("1e-8", "1e-4"),
    "optim.momentum": between("0.9", "0.5", needs=("optim.name=sgd",)),
    "optim.nesterov": Change(ALL, ("optim.name=sgd",)),
    "optim.alpha": between("0.99", "0.9", needs=("optim.name=rmsprop",)),
    "optim.scale": Change(ALL, ("optim.name=muon",)),
    "optim.coefficients": Change(ALL, ("optim.name=muon",)),
    "optim.ns_steps": between("2", "5", needs=("optim.name=muon",)),
    "optim.factor_beta": between("0.9", "1", needs=SHAMPOO),
    "optim.exponent": between("0.25", "0.5", needs=SHAMPOO),
    "optim.block_size": between("8", "16", needs=SHAMPOO),
    "optim.grafting": Change(ALL, SHAMPOO),
    "optim.precondition_every": between("1", "5", needs=SHAMPOO),
    "optim.start_step": between("1", "2", needs=SHAMPOO),
    "optim.ridge": between("1e-4", "1e-2", needs=SHAMPOO),
    "optim.max_dim": between("16", "32", needs=("optim.name=soap",)),
    "optim.rank": between("2", "4", needs=("optim.name=galore",)),
    "optim.update_scale": between("0.25", "0.5", needs=("optim.name=galore",)),
    "optim.options": between("{ridge: 1}", "{ridge: 2}", needs=("optim.name=tests.optim.own_rule:Whitened",)),
    "optim.split_heads": Change(ALL, ("optim.name=muon",)),
    "optim.adamw.lr": between("1e-3", "2e-3", needs=("optim.name=muon",)),
    "optim.adamw.weight_decay": between("0", "0.5", needs=("optim.name=muon",)),
    "optim.adamw.betas": between("[0.9, 0.95]", "[0.8, 0.95]", "[0.9, 0.8]", needs=("optim.name=muon",)),
    "optim.adamw.eps": between("1e-8", "1e-4", needs=("optim.name=muon",)),
    **{f"optim.roles.{role}.lr_scale": between("1", "0.5", needs=MOE) for role in typing.get_args(Role)},
    **{f"optim.roles.{role}.weight_decay": between("0.1", "0.5", needs=MOE) for role in typing.get_args(Role)},
    # From the second of four steps on, all shapes differ.
    "schedule.name": Change(ALL, ("schedule.warmup_steps=1", "train.steps=4")),
    "schedule.warmup_steps": to("2"),
    "schedule.decay_steps": between("1", "2", needs=("schedule.name=wsd",)),
    "schedule.min_lr_ratio": between("0.1", "0.5"),
    "train.steps": to("3"),
    "train.global_batch_size": to("2"),
    "train.micro_batch_size": to("4"),
    "train.grad_clip": Change(("null", "0.1")),
    "train.precision": Change(ALL),
    "train.loss_scale_init": between("256", "1024", needs=("train.precision=fp16",)),
    "train.loss_scale_interval": between("1", "100", needs=("train.precision=fp16",)),
    "train.activation_checkpointing": Change(ALL),
    "train.activation_checkpointing_every": to("2", "train.activation_checkpointing=full"),
    "train.compile": Change(ALL),
    "train.deterministic": Change(ALL),
    "train.max_skipped_steps": between("1", "2", needs=("optim.lr=1e30", "train.steps=3")),
    "train.spike_score": between("0.01", "100", needs=SPIKES),
    "train.on_spike": Change(ALL, SPIKES),
    "train.max_roll_backs": between("1", "2", needs=(*SPIKES, "train.on_spike=roll_back")),
    "train.sample_prompt": Change((UNSET, "abc", "xyz")),
    "train.max_hours": to("1e-9"),
    "parallel.engine": Change(ALL, world=2),
    "parallel.dp_replicate": to("2", world=2),
    "parallel.dp_shard": to("1", world=2),  # with one replica, two ranks are then one too many
    "parallel.ep": to("2", *MOE, world=2),
    "parallel.tp": to("2", world=2),
    "parallel.zero_stage": Change(("0", "1", "2", "3"), ("parallel.engine=deepspeed",), 2),
    "parallel.offload": Change(ALL, ("parallel.engine=deepspeed", "parallel.zero_stage=3"), 2),
    "parallel.deepspeed_config": Change(
        ("inputs/zero-a.json", "inputs/zero-b.json"), ("parallel.engine=deepspeed",), 2
    ),
    "checkpoint.every": to("1"),
    "checkpoint.every_minutes": between("null", "1e-6"),
    "checkpoint.keep": to("1", "checkpoint.every=1"),
    "checkpoint.keep_every": to("1", "checkpoint.every=1", "checkpoint.keep=1"),
    "checkpoint.async": Change(ALL),
    "checkpoint.when_busy": Change(ALL, ("checkpoint.every=1", "checkpoint.async=false")),  # to skip is agreed on
    "checkpoint.resume": Change(("auto", "never"), earlier=("train.steps=1",)),
    "checkpoint.load_optimizer": Change(
        ALL,
        ("run.name=later", "checkpoint.resume=runs/earlier"),
        earlier=("run.name=earlier", "checkpoint.resume=auto", "train.steps=1"),
    ),
    "eval.every": to("1"),
    "eval.batches": to("0"),
    "log.every": to("2"),
    "log.spectra_every": between("0", "1", "2"),
    "launch.preflight": Change(ALL, world=2),
    "stages": to("[{tokens: 64}, {tokens: 32, data: {seq_len: 8}}]"),
}

# Keys that no run can show to act, and why. A key belongs here only if nothing that one may see depends on it.
EXCEPTIONS: dict[str, str] = {
    "checkpoint.max_failures": "no config makes saves fail (test_saving.py lets them, and counts)",
    "parallel.tp_across_nodes": "it permits a layout over several machines, and tests have one "
    "(test_tensor_parallel.py tells the two values apart)",
    "train.hang_minutes": "it acts on processes that hang, and ends them (tests/launch/test_kills.py)",
    "launch.max_restarts": "it acts on processes that died, and on the launcher (tests/launch/test_kills.py)",
    "data.tokenizer.kind": "each kind has keys of its own (vocab_size, path), so it cannot change alone",
}
