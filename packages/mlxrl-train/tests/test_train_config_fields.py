"""Every field of the config acts: changing it changes what a run draws, computes, writes or says."""

# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportAttributeAccessIssue=false

import json
import shutil
import string

import pytest
from pydantic import BaseModel

from mlxrl.policy.testing import make_tiny_model
from mlxrl.train import ConfigError, Observer, RunError, TrainConfig, load_config, train

VOLATILE = ("time/", "tokens_per_second", "peak_memory_gb")
TWO = {"steps": 2}
REUSED = {"update.updates_per_batch": 3, "optimizer.learning_rate": 0.1}
CONSTANT = {"rewards": ({"name": "exact_match"},)}  # a random model never matches: every group's rewards are 0
FILTERED = {"sampling.top_k": 2}  # rollouts are not drawn from the policy
SLOW = {"env_name": "PROJECT/my_envs.py:slow"}
HELD_OUT = {"data.eval_path": "PROJECT/tasks.jsonl", "eval.tasks": 2}

# For each field: the environment, what the run is before the change (besides the base), the change, and where it shows.
# A change of more fields than one is needed where the config refuses one alone.
CHANGES = {
    "model_id": ("jsonl", {}, "OTHER_MODEL", "rollouts"),
    "env_name": ("rooms", {}, "PROJECT/my_envs.py:failing", "rollouts"),
    "steps": ("jsonl", {}, 2, "metrics"),
    "group_size": ("jsonl", {}, 3, "rollouts"),
    "groups_per_step": ("jsonl", {}, 1, "rollouts"),
    "seed": ("jsonl", {}, 1, "rollouts"),
    "code_folder": ("rooms", {}, {"code_folder": "PROJECT", "env_name": "my_envs.py:failing"}, "rollouts"),
    "output": ("jsonl", {}, "ELSEWHERE", "folder"),
    "max_prompt_len": ("jsonl", {}, 5, "rollouts"),
    "max_completion_len": ("jsonl", {}, 4, "rollouts"),
    "max_turns": ("rooms", {}, 2, "rollouts"),
    "max_observation_len": ("rooms", {}, 2, "rollouts"),
    "rollout_mode": ("jsonl", {}, "sequential", "decoding"),
    "use_chat_template": ("jsonl", {}, False, "rollouts"),
    "chat_template_kwargs": ("jsonl", {"model_id": "TALKATIVE"}, {"mood": "glad"}, "rollouts"),
    "quant_bits": ("jsonl", {}, 4, "error"),
    "adapter": ("jsonl", {}, "ADAPTER", "adapter"),
    "rank": ("jsonl", {}, 3, "adapter"),
    "scale": ("jsonl", {}, 4.0, "adapter"),
    "rank_stabilized": ("jsonl", {}, True, "adapter"),
    "use_dora": ("jsonl", {}, True, "adapter"),
    "targets": ("jsonl", {}, ["self_attn"], "adapter"),
    "last_layers": ("jsonl", {"model_id": "OTHER_MODEL"}, 1, "adapter"),
    "dropout": ("jsonl", {}, 0.5, "metrics"),
    "gradient_checkpointing": ("jsonl", {}, True, "blocks"),
    "checkpoint_granularity": ("jsonl", {}, "whole", "error"),
    "iogpu_wired_limit_mb": ("jsonl", {}, 64, "inactive"),
    "micro_batch_size": ("jsonl", {}, 1, "passes"),
    "kl_beta": ("jsonl", TWO, 0.5, "metrics"),
    "reference": ("jsonl", {"adapter": "ADAPTER", "kl_beta": 0.5}, "initial_adapter", "metrics"),
    "echo_alpha": ("rooms", {}, 0.1, "metrics"),
    "echo_schedule": (
        "rooms",
        TWO | {"echo_alpha": 0.1},
        {"echo_schedule": "linear_taper_to_zero", "echo_taper_steps": 2},
        "metrics",
    ),
    "echo_taper_steps": (
        "rooms",
        TWO | {"echo_alpha": 0.1, "echo_schedule": "linear_taper_to_zero", "echo_taper_steps": 4},
        2,
        "metrics",
    ),
    "optimizer.name": ("jsonl", {}, "lion", "adapter"),
    "optimizer.learning_rate": ("jsonl", {}, 0.02, "adapter"),
    "optimizer.betas": ("jsonl", TWO, [0.5, 0.9], "adapter"),
    "optimizer.eps": ("jsonl", {}, 0.1, "adapter"),
    "optimizer.momentum": ("jsonl", TWO | {"optimizer.name": "muon"}, 0.5, "adapter"),
    "optimizer.weight_decay": ("jsonl", {}, 0.1, "adapter"),
    "optimizer.bias_correction": ("jsonl", {}, False, "adapter"),
    "optimizer.schedule": ("jsonl", TWO, "linear", "adapter"),
    "optimizer.warmup_steps": ("jsonl", {}, 3, "adapter"),
    "optimizer.end_learning_rate": ("jsonl", TWO | {"optimizer.schedule": "linear"}, 0.001, "adapter"),
    "sampling.temperature": ("jsonl", {}, 0.5, "rollouts"),
    "sampling.top_p": ("jsonl", {}, 0.3, "rollouts"),
    "sampling.min_p": ("jsonl", {}, 0.9, "rollouts"),
    "sampling.top_k": ("jsonl", {}, 2, "rollouts"),
    "algorithm.name": ("jsonl", {}, "rloo", "metrics"),
    "algorithm.clip_low": ("jsonl", REUSED, 0.001, "metrics"),
    "algorithm.clip_high": ("jsonl", REUSED, 0.001, "metrics"),
    "algorithm.reduction": ("jsonl", {}, "sequence_sum", "metrics"),
    "algorithm.advantage": ("jsonl", {}, "centred", "metrics"),
    "algorithm.ddof": ("jsonl", {}, 1, "metrics"),
    "algorithm.kl_estimator": ("jsonl", TWO | {"kl_beta": 0.5}, "k2", "metrics"),
    "algorithm.kl_placement": ("jsonl", TWO | {"kl_beta": 0.5}, "reward", "metrics"),
    "algorithm.mask_truncated": ("jsonl", {}, True, "metrics"),
    "algorithm.overlong_buffer": ("jsonl", {}, 2, "metrics"),
    "algorithm.dynamic_sampling": ("jsonl", CONSTANT, True, "rollouts"),
    "algorithm.max_draws": ("jsonl", CONSTANT | {"algorithm.dynamic_sampling": True}, 2, "rollouts"),
    "algorithm.max_skipped_steps": (
        "jsonl",
        CONSTANT | TWO | {"algorithm.dynamic_sampling": True, "algorithm.max_draws": 1},
        1,
        "error",
    ),
    "algorithm.dapo_dynamic_sampling": ("jsonl", CONSTANT | {"algorithm.name": "dapo"}, False, "rollouts"),
    "algorithm.correction": ("jsonl", FILTERED, "tis", "metrics"),
    "algorithm.correction_level": ("jsonl", FILTERED | {"algorithm.correction": "tis"}, "sequence", "metrics"),
    "algorithm.correction_cap": ("jsonl", FILTERED | {"algorithm.correction": "tis"}, 0.01, "metrics"),
    "algorithm.correction_band": ("jsonl", FILTERED | {"algorithm.correction": "mis"}, [0.0, 2.0], "metrics"),
    "algorithm.gspo_importance": ("jsonl", {"algorithm.name": "gspo"}, "token", "inactive"),
    "algorithm.drgrpo_normalize_rewards": ("jsonl", {"algorithm.name": "dr-grpo"}, True, "metrics"),
    "algorithm.drgrpo_loss_reduction": ("jsonl", {"algorithm.name": "dr-grpo"}, "token_mean", "metrics"),
    "algorithm.drgrpo_max_tokens": ("jsonl", {"algorithm.name": "dr-grpo"}, 99, "metrics"),
    "algorithm.gigpo_omega": ("rooms", {"algorithm.name": "gigpo"}, 0.5, "metrics"),
    "algorithm.gigpo_gamma": ("rooms", {"algorithm.name": "gigpo"}, 0.5, "metrics"),
    "algorithm.gigpo_normalization": ("rooms", {"algorithm.name": "gigpo"}, "center", "metrics"),
    "algorithm.options": (
        "jsonl",
        {"algorithm.name": "sapo"},
        {"algorithm.options": {"tau_negative": 3.0}},
        "metrics",
    ),
    "update.updates_per_batch": ("jsonl", {}, 2, "adapter"),
    "update.minibatches": ("jsonl", {}, 2, "adapter"),
    "update.max_tokens_per_micro_batch": ("jsonl", {}, 8, "passes"),
    "update.max_grad_norm": ("jsonl", TWO, 0.001, "adapter"),
    "rollout.width": ("jsonl", {}, 2, "decoding"),
    "rollout.context": ("rooms", {}, "turn", "rollouts"),
    "rollout.max_context": ("jsonl", {"max_prompt_len": 4}, 5, "rollouts"),
    "rollout.stop": ("jsonl", {}, list(string.printable[:95]), "rollouts"),
    "rollout.weights": ("jsonl", {}, "merged", "metrics"),
    "rollout.kv_budget_gb": ("jsonl", {}, 1e-6, "decoding"),
    "rollout.deterministic": ("rooms", SLOW, False, "decoding"),
    "rollout.env_timeout": ("rooms", SLOW, 0.1, "rollouts"),
    "data.path": ("jsonl", {}, "PROJECT/others.jsonl", "rollouts"),
    "data.format": ("jsonl", {"data.format": "jsonl"}, "csv", "error"),
    "data.split": ("jsonl", {}, "test", "error"),  # of a file, which has none
    "data.subset": ("jsonl", {}, "main", "error"),
    "data.prompt_column": ("jsonl", {}, "other", "rollouts"),
    "data.answer_column": ("jsonl", {}, "other", "metrics"),
    "data.columns": ("jsonl", {}, {"prompt": "other"}, "rollouts"),
    "data.system_prompt": ("jsonl", {}, "Hush.", "rollouts"),
    "data.prompt_template": ("jsonl", {}, "{prompt}{other}", "rollouts"),
    "data.overlong": ("jsonl", {"max_prompt_len": 9}, "error", "error"),
    "data.eval_path": ("jsonl", HELD_OUT, "PROJECT/others.jsonl", "evaluations"),
    "data.eval_split": ("jsonl", HELD_OUT, "test", "error"),
    "data.eval_fraction": ("jsonl", {}, 0.9, "rollouts"),
    "data.seed": ("jsonl", {"data.eval_fraction": 0.5}, 1, "rollouts"),
    "environment": ("arithmetic", {}, {"environment": {"terms": [4, 4], "size": 20}}, "rollouts"),
    "rewards.name": ("jsonl", {}, "PROJECT/my_rewards.py:spread", "metrics"),
    "rewards.weight": ("jsonl", {}, 2.0, "metrics"),
    "rewards.options": ("jsonl", {}, {"factor": 2.0}, "metrics"),
    "rewards.timeout": ("jsonl", {}, 0.0, "metrics"),
    "eval.tasks": ("jsonl", HELD_OUT, 3, "evaluations"),
    "eval.every": ("jsonl", TWO | HELD_OUT, 1, "evaluations"),
    "eval.temperature": ("jsonl", HELD_OUT, 1.0, "evaluations"),
    "checkpoint.every": ("jsonl", TWO, 1, "files"),
    "checkpoint.keep": ("jsonl", TWO | {"checkpoint.every": 1}, 1, "files"),
    "logging.to": ("jsonl", {}, ["somewhere"], "error"),
    "logging.full_score_every": ("jsonl", CONSTANT, 0, "metrics"),
}
# Fields that must change nothing of what is learned, only how it is computed.
NEUTRAL = (
    "rollout_mode", "gradient_checkpointing", "micro_batch_size", "update.max_tokens_per_micro_batch", "rollout.width",
    "rollout.kv_budget_gb", "rollout.deterministic",
)  # fmt: skip


def leaves(model, prefix=""):
    """The dotted names of all fields; of sections, their own fields."""
    names = []
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        names += leaves(sections[0], f"{prefix}{name}.") if sections else [prefix + name]
    return names


def test_every_field_of_the_config_has_a_change_here():
    assert sorted(leaves(TrainConfig)) == sorted(CHANGES)


class Watching(Observer):
    """Keeps the live objects of a run and counts its passes without a cache: those of scoring and of the update."""

    def on_start(self, session, folder, first_step):
        self.session, self.passes = session, []
        passes, trunk = self.passes, session.model.model

        class Counting(type(trunk)):
            def __call__(self, inputs, cache=None, *args, **kwargs):
                if cache is None:
                    passes.append(inputs.shape)
                return super().__call__(inputs, cache, *args, **kwargs)

        trunk.__class__ = Counting


def outcome(fields):
    """All that can be seen of a run: what it drew, computed, wrote and said; or its refusal."""
    watching = Watching()
    try:
        result = train(load_config(None, fields), observer=watching, force=True)
    except (ConfigError, RunError) as error:
        return {"error": str(error)}

    def rows(name):
        path = result.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(VOLATILE)} for line in lines]

    session = watching.session
    stats = session.engine.stats
    return {
        "error": None,
        "folder": result.folder,
        "files": sorted(str(path.relative_to(result.folder)) for path in result.folder.rglob("*")),
        "rollouts": rows("rollouts"),
        "metrics": rows("metrics"),
        "evaluations": rows("evaluations"),
        "adapter": (result.folder / "adapters" / "adapters.safetensors").read_bytes(),
        "passes": watching.passes,
        "decoding": (stats.decode_forwards, stats.prefill_forwards),
        "blocks": type(session.model.layers[0]).__name__,
        "inactive": session.inactive,
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, tiny, project):
    """outcomes(environment, before, change) -> what is seen of the run before and after; runs before are shared."""
    folder = tmp_path_factory.mktemp("fields")
    (project / "others.jsonl").write_text('{"prompt": "c", "answer": "1"}\n{"prompt": "dd", "answer": "2"}\n')
    other = make_tiny_model(folder / "other", "qwen3", seed=4)
    talkative = folder / "talkative"
    shutil.copytree(tiny, talkative)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ mood or 'sad' }}"
    (talkative / "chat_template.jinja").write_text(template)
    stands_for = {
        "OTHER_MODEL": str(other),
        "TALKATIVE": str(talkative),
        "PROJECT": str(project),
        "ELSEWHERE": str(folder / "elsewhere"),
        "ADAPTER": str(folder / "first" / "adapters"),
    }

    def resolved(value):
        for name, meaning in stands_for.items():
            value = value.replace(name, meaning) if isinstance(value, str) else value
        return value

    base = {
        "model_id": str(tiny), "steps": 1, "group_size": 2, "groups_per_step": 2, "max_completion_len": 3, "rank": 2,
        "optimizer.learning_rate": 0.01, "output": str(folder / "run"),
    }  # fmt: skip
    rewarded = {"rewards": ({"name": f"{project}/my_rewards.py:by_answer"},)}
    environments = {
        "jsonl": {"env_name": "jsonl", "data.path": f"{project}/tasks.jsonl", **rewarded},
        "rooms": {"env_name": f"{project}/my_envs.py:rooms"},
        "arithmetic": {"env_name": "arithmetic", "environment.size": 20, **rewarded},
    }
    train(load_config(None, base | environments["jsonl"] | {"output": str(folder / "first")}))
    known = {}

    def run(environment, before, change):
        start = base | environments[environment] | {name: resolved(value) for name, value in before.items()}
        key = json.dumps(start, sort_keys=True)
        if key not in known:
            known[key] = outcome(start)
        changed = start | {name: resolved(value) for name, value in change.items()}
        return known[key], outcome(changed)

    return run


@pytest.mark.parametrize("field", CHANGES)
def test_changing_a_field_changes_what_it_says_it_does(outcomes, project, field):
    environment, before, value, shows = CHANGES[field]
    change = value if isinstance(value, dict) and field in value else {field: value}
    if field.startswith("rewards."):  # a list of sections: replaced as a whole
        reward = {"name": f"{project}/my_rewards.py:by_answer"} | {field.removeprefix("rewards."): value}
        change = {"rewards": ({**reward, "name": reward["name"].replace("PROJECT", str(project))},)}
    first, second = outcomes(environment, before, change)
    assert first["error"] is None
    assert first[shows] != second[shows]
    if field in NEUTRAL:
        assert second["rollouts"] == first["rollouts"]
        for ours, others in zip(second["metrics"], first["metrics"], strict=True):
            learned = [
                {k: v for k, v in row.items() if not k.startswith(("rollout/", "forwards/"))} for row in (ours, others)
            ]
            assert learned[0] == pytest.approx(learned[1], rel=1e-3, abs=1e-5)
