"""A config is read, checked and written back; what cannot run is refused in a line that says what to do.

It is long because it holds the table of everything that is refused.
"""

import json
import re

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from pydantic import BaseModel

from mlxrl.policy.testing import THINKING_TEMPLATE, character_tokenizer, make_tiny_model
from mlxrl.train import (
    ConfigError,
    TrainConfig,
    config_schema,
    config_toml,
    load_config,
    make_config,
    open_session,
    parse_override,
    train,
)

MODEL = 'model_id = "m"\n'

# TOML besides the model's name, and the whole message after the file's name.
BAD = {
    "an unknown key": ("grup_size = 4", r"grup_size: unknown key; did you mean 'group_size'\?"),
    "an unknown key in a section": (
        "[optimizer]\nlearning_rat = 1e-4",
        r"optimizer\.learning_rat: unknown key; did you mean 'learning_rate'\?",
    ),
    "an unknown key in an optional section": (
        'env_name = "jsonl"\n[data]\npath = "x"\nprompt_colum = "q"',
        r"data\.prompt_colum: unknown key; did you mean 'prompt_column'\?",
    ),
    "an unknown key in a list of sections": (
        '[[rewards]]\nname = "exact_match"\nwieght = 2.0',
        r"rewards\.0\.wieght: unknown key; did you mean 'weight'\?",
    ),
    "an unknown key like no other": ("[checkpoint]\nzzz = 1", r"checkpoint\.zzz: unknown key; known are every, keep\."),
    "a place that numbers cannot go to": (
        '[logging]\nto = ["wandb"]',
        r"logging\.to\.0: should be 'jsonl', got 'wandb' \(str\)\.",
    ),
    "a step that never comes": (
        "[logging]\nfull_score_every = -1",
        r"logging\.full_score_every: should be greater than or equal to 0, got -1 \(int\)\.",
    ),
    "an unknown section": ("[samplng]\ntop_k = 1", r"samplng: unknown key; did you mean 'sampling'\?"),
    "a rate that is no number": (
        "[optimizer]\nlearning_rate = nan",
        r"optimizer\.learning_rate: should be a finite number, got nan \(float\)\.",
    ),
    "an infinite rate": (
        "[optimizer]\nlearning_rate = inf",
        r"optimizer\.learning_rate: should be a finite number, got inf \(float\)\.",
    ),
    "a rate of 0": (
        "[optimizer]\nlearning_rate = 0",
        r"optimizer\.learning_rate: should be greater than 0, got 0 \(int\)\.",
    ),
    "a size in quotes": ('group_size = "4"', r"group_size: should be a valid integer, got '4' \(str\)\."),
    "half a step": ("steps = 2.5", r"steps: should be a valid integer, got 2\.5 \(float\)\."),
    "a truth for a number": ("steps = true", r"steps: should be a valid integer, got True \(bool\)\."),
    "a number for a truth": (
        "gradient_checkpointing = 1",
        r"gradient_checkpointing: should be a valid boolean, got 1 \(int\)\.",
    ),
    "no group at all": ("group_size = 0", r"group_size: should be greater than or equal to 1, got 0 \(int\)\."),
    "temperature 0": (
        "[sampling]\ntemperature = 0",
        r"sampling\.temperature: should be greater than or equal to 0\.01, got 0 \(int\)\.",
    ),
    "a top_p above 1": (
        "[sampling]\ntop_p = 1.5",
        r"sampling\.top_p: should be less than or equal to 1, got 1\.5 \(float\)\.",
    ),
    "odd bits": ("quant_bits = 3", r"quant_bits: should be 4, 8, 16 or 32, got 3 \(int\)\."),
    "one beta": (
        "[optimizer]\nbetas = [0.9]",
        r"optimizer\.betas: should be a list of 2 numbers, got \[0\.9\] \(list\)\.",
    ),
    "three betas": (
        "[optimizer]\nbetas = [0.9, 0.9, 0.9]",
        r"optimizer\.betas: should be a list of 2 numbers, got \[0\.9, 0\.9, 0\.9\] \(list\)\.",
    ),
    "one stop text": (
        '[rollout]\nstop = "x"',
        r"rollout\.stop: should be a list of strings, got 'x' \(str\)\.",
    ),
    "one reward": (
        '[rewards]\nname = "length"',
        r"rewards: should be a list of tables, each written as \[\[rewards\]\], got {'name': 'length'} \(dict\)\.",
    ),
    "a section that is none": ("eval = 5", r"eval: should be a table of fields, got 5 \(int\)\."),
    "options that are none": (
        '[[rewards]]\nname = "length"\noptions = 3',
        r"rewards\.0\.options: should be a table, such as {key = 1}, got 3 \(int\)\.",
    ),
    "an unknown schedule": (
        '[optimizer]\nschedule = "step"',
        r"optimizer\.schedule: should be 'constant', 'linear' or 'cosine', got 'step' \(str\)\.",
    ),
    "an unknown granularity": (
        'checkpoint_granularity = "whole"',
        r"checkpoint_granularity: should be 'per-layer', got 'whole' \(str\)\.",
    ),
    "an unknown algorithm": (
        '[algorithm]\nname = "ppo"',
        r"algorithm\.name: algorithm must be one of cispo, .*, got 'ppo'\.",
    ),
    "clips without clips": (
        '[algorithm]\nname = "cispo"\nclip_low = 0.2',
        r"algorithm\.clip_low = 0\.2 has no effect on cispo, which has no clip_low; leave it out\.",
    ),
    "gspo's option on another": (
        '[algorithm]\ngspo_importance = "token"',
        r"algorithm\.gspo_importance = 'token' belongs to gspo, not to grpo; leave it out\.",
    ),
    "gigpo's option on another": (
        '[algorithm]\nname = "gspo"\ngigpo_omega = 0.5',
        r"algorithm\.gigpo_omega = 0\.5 belongs to gigpo, not to gspo; leave it out\.",
    ),
    "dr-grpo's option on another": (
        "[algorithm]\ndrgrpo_max_tokens = 64",
        r"algorithm\.drgrpo_max_tokens = 64 belongs to dr-grpo, not to grpo; leave it out\.",
    ),
    "a constant length without its reduction": (
        '[algorithm]\nname = "dr_grpo"\ndrgrpo_loss_reduction = "token_mean"\ndrgrpo_max_tokens = 64',
        r"dr-grpo: max_tokens must be left out unless reduction is sequence_max_tokens .*, got 64.*",
    ),
    "two reductions": (
        '[algorithm]\nname = "drgrpo"\ndrgrpo_loss_reduction = "token_mean"\nreduction = "sequence_sum"',
        r"algorithm\.reduction = 'sequence_sum' .*; leave one of them out\.",
    ),
    "a deviation that is divided by nowhere": (
        '[algorithm]\nadvantage = "centred"\nddof = 1',
        r"algorithm\.ddof = 1 has no effect on advantage = 'centred', which divides by no .*; leave it out\.",
    ),
    "a group of one without a baseline": (
        'group_size = 1\n[algorithm]\nname = "rloo"',
        r"group_size = 1 is too small for rloo, whose baseline needs 2; raise it\.",
    ),
    "a placed KL without a weight": (
        '[algorithm]\nkl_placement = "reward"',
        r"algorithm\.kl_placement = 'reward' needs kl_beta above 0; set it\.",
    ),
    "an estimator without a weight": (
        '[algorithm]\nkl_estimator = "k2"',
        r"algorithm\.kl_estimator = 'k2' acts on a KL in the loss only; set kl_beta above 0 and kl_pl.* = 'loss'\.",
    ),
    "an estimator of a KL in the reward": (
        'kl_beta = 0.1\n[algorithm]\nkl_estimator = "k2"\nkl_placement = "reward"',
        r"algorithm\.kl_estimator = 'k2' acts on a KL in the loss only; set kl_beta above 0 and kl_pl.* = 'loss'\.",
    ),
    "decay on adam": (
        '[optimizer]\nname = "adam"\nweight_decay = 0.1',
        r"optimizer: weight_decay = 0\.1 has no effect on adam; set name = 'adamw'\.",
    ),
    "an end without a schedule": (
        "[optimizer]\nend_learning_rate = 1e-6",
        r"optimizer: end_learning_rate = 1e-06 has no effect on a constant schedule; set schedule = .*'\.",
    ),
    "a schedule that rises": (
        '[optimizer]\nschedule = "linear"\nend_learning_rate = 1.0',
        r"optimizer: end_learning_rate = 1\.0 is above learning_rate = 5e-05, and a schedule falls; lower it\.",
    ),
    "jsonl without data": (
        'env_name = "jsonl"',
        r"env_name = 'jsonl' needs \[data\] with a path; name the file of tasks\.",
    ),
    "data without its environment": (
        '[data]\npath = "tasks.jsonl"',
        r"\[data\] is read by env_name = 'dataset' only, got env_name = 'arithmetic'\.",
    ),
    "data without a path": (
        'env_name = "jsonl"\n[data]\nprompt_column = "q"',
        r"data\.path: needs a value; set it\. What it is: File of JSON lines .* the hub\.",
    ),
    "a reference without an adapter": (
        'kl_beta = 0.1\nreference = "initial_adapter"',
        r"reference = 'initial_adapter' needs adapter, the folder of .*; set it, or reference = 'base'\.",
    ),
    "an unknown reference": (
        'reference = "adapter"',
        r"reference: should be 'base' or 'initial_adapter', got 'adapter' \(str\)\.",
    ),
    "a target without a name": (
        'targets = ["q_proj", ""]',
        r"targets\.1: should have at least 1 character, got '' \(str\)\.",
    ),
    "an option of another optimizer": (
        '[optimizer]\nname = "lion"\nmomentum = 0.9',
        r"optimizer: momentum = 0\.9 has no effect on lion; leave it out, or set name = 'muon'\.",
    ),
    "more minibatches than trajectories": (
        "group_size = 2\ngroups_per_step = 2\n[update]\nminibatches = 5",
        r"update\.minibatches = 5 exceeds the 4 trajectories of a step; lower it or raise groups_per_step\.",
    ),
    "a taper without its length": (
        'echo_alpha = 0.1\necho_schedule = "linear_taper_to_zero"',
        r"echo_schedule = 'linear_taper_to_zero' needs echo_taper_steps; set the number of steps\.",
    ),
    "a taper of nothing": (
        'echo_schedule = "linear_taper_to_zero"\necho_taper_steps = 5',
        r"echo_schedule = 'linear_taper_to_zero' has no effect on echo_alpha = 0; set echo_alpha\.",
    ),
    "a length without a taper": (
        "echo_alpha = 0.1\necho_taper_steps = 5",
        r"echo_taper_steps = 5 has no effect on a constant schedule; set echo_schedule = .* or leave it out\.",
    ),
    "a world model without a transcript": (
        'echo_alpha = 0.1\n[rollout]\ncontext = "turn"',
        r"echo_alpha = 0\.1 has nothing to predict when rollout\.context = 'turn'.*; set rollout\.context = .*\.",
    ),
    "a context without room for an action": (
        "max_prompt_len = 100\n[rollout]\nmax_context = 100",
        r"rollout\.max_context = 100 leaves no room for an action after a prompt of max_prompt_len = 100 tokens; .*",
    ),
    "a stop text that is empty": (
        '[rollout]\nstop = ["\\n", ""]',
        r"rollout\.stop\.1: should have at least 1 character, got '' \(str\)\.",
    ),
    "unknown weights": (
        '[rollout]\nweights = "dense"',
        r"rollout\.weights: should be 'shared', 'merged' or 'auto', got 'dense' \(str\)\.",
    ),
    "caches of no size": (
        "[rollout]\nkv_budget_gb = 0.0",
        r"rollout\.kv_budget_gb: should be greater than 0, got 0\.0 \(float\)\.",
    ),
    "a time below 0": (
        "[rollout]\nenv_timeout = -1",
        r"rollout\.env_timeout: should be greater than or equal to 0, got -1 \(int\)\.",
    ),
    "arguments of a template that is off": (
        "use_chat_template = false\n[chat_template_kwargs]\nenable_thinking = false",
        r"chat_template_kwargs = .* has no effect with use_chat_template = false; leave one of them out\.",
    ),
    "evaluations of no tasks": (
        "[eval]\nevery = 5",
        r"eval: every = 5 has no effect without tasks; set tasks above 0\.",
    ),
    "a temperature of no tasks": (
        "[eval]\ntemperature = 0.5",
        r"eval: temperature = 0\.5 has no effect without tasks; set tasks above 0\.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_is_refused_in_one_line_that_names_field_value_and_remedy(tmp_path, case):
    text, message = BAD[case]
    path = tmp_path / "config.toml"
    path.write_text(MODEL + text)
    with pytest.raises(ConfigError) as refusal:
        load_config(path)
    assert re.fullmatch(rf"config error in {re.escape(str(path))}: {message}", str(refusal.value)), refusal.value


WRONG = ("wrong", 7.5, True, ["wrong", 7], {"wrong": 7})


def leaves(model, prefix=""):
    """The dotted names of all fields; of sections, their own fields."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        yield from leaves(sections[0], f"{prefix}{name}.") if sections else [prefix + name]


@pytest.mark.parametrize("name", list(leaves(TrainConfig)))
def test_a_value_of_a_wrong_type_is_named_with_its_field_and_with_what_it_should_be(tmp_path, name):
    path = tmp_path / "config.toml"
    path.write_text(MODEL + ('env_name = "jsonl"\ndata.path = "x"' if name.startswith("data.") else ""))
    refused = []
    for value in WRONG:
        fields, shown = {name: value}, name
        if name.startswith("rewards."):
            shown = name.replace(".", ".0.")
            fields = {"rewards": [{"name": "length", name.removeprefix("rewards."): value}]}
        try:
            load_config(path, fields)
        except ConfigError as error:
            message = str(error)
            assert "tuple" not in message.lower()
            assert "dictionary" not in message
            if re.match(rf".*: {re.escape(shown)}(\.\w+)*: should (be|have) .*, got .+ \(\w+\)\.$", message):
                assert message.startswith(f"config error in an option given over {path}: ")
                assert any(f"got {part!r} (" in message for part in (value, "wrong", 7))  # or a part of the value
                refused.append(value)
    assert len(refused) >= 3  # a number may be whole or not, and a combination may be what is refused


def test_a_fault_is_said_to_be_where_it_was_set(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(MODEL + "group_size = 0\n")

    def refusal(**overrides):
        with pytest.raises(ConfigError) as error:
            load_config(path, {name.replace("__", "."): value for name, value in overrides.items()})
        return str(error.value)

    in_file = f"config error in {path}: group_size: should be greater than or equal to 1, got 0 (int)."
    assert refusal() == in_file
    assert refusal(steps=5) == in_file
    assert refusal(steps=0).split("\n") == [
        f"config error in an option given over {path}: steps: should be greater than or equal to 1, got 0 (int).",
        in_file,
    ]
    path.write_text(MODEL)
    mixed = f"config error in {path} with the options given over it: "
    assert refusal(rollout__max_context=4).startswith(f"{mixed}rollout.max_context = 4 leaves no room")
    assert refusal(eval__every=4) == f"{mixed}eval: every = 4 has no effect without tasks; set tasks above 0."


def test_every_fault_of_a_config_has_a_line_of_its_own():
    with pytest.raises(ConfigError) as refusal:
        make_config({"steps": 0, "group_size": "4", "sampling": {"temperature": -1.0}})
    lines = str(refusal.value).removeprefix("config error: ").split("\n")
    assert [line.strip().split(":")[0] for line in lines] == [
        "model_id", "steps", "group_size", "sampling.temperature",
    ]  # fmt: skip


def test_files_that_are_missing_broken_or_no_text_are_refused(tmp_path):
    missing, broken, binary = (tmp_path / name for name in ("missing.toml", "broken.toml", "binary.toml"))
    broken.write_text("steps = \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (missing, "does not exist; `mlxrl-cli init` writes one to start from."),
        (broken, "is not valid TOML: Invalid value"),
        (binary, "cannot be read: 'utf-8' codec"),
        (tmp_path, "cannot be read: "),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"config file {path} {message}")) as refusal:
            load_config(path)
        assert "\n" not in str(refusal.value)


# Fields of a run on a model that does not exist, and the message: none of them gets as far as the model.
BEFORE_THE_MODEL = {
    "an unknown environment": (
        {"env_name": "arithmetics"},
        r"unknown environment 'arithmetics'; did you mean 'arithmetic'\?",
    ),
    "an unknown option": (
        {"environment": {"siz": 5}},
        r"unknown option of environment 'arithmetic': 'siz'; did you mean 'size'",
    ),
    "an option out of range": ({"environment": {"size": 0}}, "size must be a whole number of at least 1, got 0"),
    "an unknown reward": (
        {"rewards": [{"name": "exact_mach"}]},
        r"rewards: unknown reward 'exact_mach'; did you mean 'exact-match'",
    ),
    "an option that a reward does not have": (
        {"rewards": [{"name": "length", "options": {"traget": 3}}]},
        r"rewards: unknown option of reward 'length': 'traget'; did you mean 'target'\?",
    ),
    "a reward twice": (
        {"rewards": [{"name": "exact_match"}, {"name": "exact_match", "weight": 2.0}]},
        "rewards: 'exact_match' is named twice; name it once, with the sum of the weights",
    ),
    "a reward in a file that is not there": (
        {"rewards": [{"name": "none.py:f"}]},
        "names the file .*none.py, which does not",
    ),
    "a file of tasks that is not there": (
        {"env_name": "jsonl", "data": {"path": "none.jsonl"}},
        "file .*none.jsonl does not exist",
    ),
    "an environment that is no environment": ({"env_name": "json:dumps"}, "needs the option|must build a suite|takes"),
    "an environment in a module that is not there": (
        {"env_name": "nowhere:make"},
        "module 'nowhere', which cannot be imported",
    ),
}


@pytest.mark.parametrize("case", BEFORE_THE_MODEL)
def test_what_cannot_be_learned_is_refused_before_any_model_is_looked_for(tmp_path, case):
    fields, message = BEFORE_THE_MODEL[case]
    config = make_config({"model_id": str(tmp_path / "no-model"), "output": str(tmp_path / "run"), **fields})
    with pytest.raises(ConfigError, match=message) as refusal:
        train(config)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_data_that_cannot_be_rewarded_or_evaluated_is_refused_before_the_model(values, project):
    def refusal(**fields):
        with pytest.raises(ConfigError) as error:
            open_session(make_config(values(model_id="no-model", **fields)))
        return str(error.value)

    assert refusal(rewards=[]) == "env_name = 'jsonl' rewards nothing by itself; add [[rewards]] with a name."
    assert refusal(eval={"tasks": 4}) == (
        "eval.tasks = 4, but env_name = 'jsonl' holds out no tasks; "
        "set data.eval_path, data.eval_split or data.eval_fraction for data, environment.eval_tasks for your own "
        "factory, or eval.tasks = 0."
    )
    path = str(project / "tasks.jsonl")
    assert refusal(rewards=[{"name": "code-tests"}]) == (
        f"rewards: 'code-tests' needs the column 'tests', which no task of data.path = {path!r} has ("
        "columns: answer, other, prompt); name it in [data], or choose another reward."
    )
    assert refusal(environment={"path": "other.jsonl"}) == (
        "environment.path = 'other.jsonl' is set by [data]; leave it out there."
    )
    assert "set eval_path or eval_fraction, not both" in refusal(
        data={"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl"), "eval_fraction": 0.5}
    )


def test_an_environment_that_breaks_when_made_or_lacks_a_part_is_named(rooms, tmp_path):
    (tmp_path / "bad.py").write_text(
        "def raises(task, seed, index):\n    raise KeyError('lamp')\n\n\n"
        "def lacks(task, seed, index):\n    return object()\n\n\n"
        "def leaves(task, seed, index):\n    raise SystemExit(3)\n\n\n"
        "class Turns:\n    def __init__(self, turns):\n        self.turns = turns\n\n"
        "    @property\n    def max_turns(self):\n        return self.turns or 1 // 0\n\n"
        "    reset = step = state_id = max\n\n\n"
        "def flag(task, seed, index):\n    return Turns(True)\n\n\n"
        "def half(task, seed, index):\n    return Turns(2.5)\n\n\n"
        "def divides(task, seed, index):\n    return Turns(0)\n\n\n"
        "def whole(task, seed, index):\n    import numpy\n    return Turns(numpy.int64(3))\n"
    )
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    for name, message in (
        ("raises", f"cannot be made: KeyError in {tmp_path / 'bad.py'}, line 2: 'lamp'"),
        ("lacks", "made a object; an environment has max_turns, reset, step and state_id."),
        ("leaves", f"cannot be made: SystemExit in {tmp_path / 'bad.py'}, line 10: 3"),
        ("flag", "an environment with max_turns = True; it must be a whole number of at least 1."),
        ("half", "an environment with max_turns = 2.5; it must be a whole number of at least 1."),
        ("divides", f"cannot be made: ZeroDivisionError in {tmp_path / 'bad.py'}, line 19: "),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            open_session(make_config(rooms(env_name=f"{tmp_path / 'bad.py'}:{name}")))
    session = open_session(make_config(rooms(env_name=f"{tmp_path / 'bad.py'}:whole")))
    assert (session.curriculum.max_turns, type(session.curriculum.max_turns)) == (3, int)
    message = re.escape(f"cannot be loaded: {tmp_path / 'exits.py'}, line 2, ended it by sys.exit(0)")
    for fields in ({"env_name": f"{tmp_path / 'exits.py'}:f"}, {"rewards": [{"name": f"{tmp_path / 'exits.py'}:f"}]}):
        with pytest.raises(ConfigError, match=message):
            open_session(make_config(rooms(**fields)))


def test_a_model_that_does_not_fit_the_config_is_refused(values, tmp_path):
    def refusal(**fields):
        with pytest.raises(ConfigError) as error:
            open_session(make_config(values(**fields)))
        return str(error.value)

    assert "'no-model' is no folder, and no hub name" in refusal(model_id="no-model")
    assert "targets ['qkv_proj'] name no linear layer of the model, which has" in refusal(targets=["qkv_proj"])
    assert "last_layers = 2 exceeds the 1 blocks of the model; lower it." in refusal(last_layers=2)
    assert "quant_bits = 4, but model_id = " in refusal(quant_bits=4)
    assert "has quantization none; name another model or leave quant_bits out." in refusal(quant_bits=8)
    assert "none' holds no adapter_config.json; name the folder of an adapter." in refusal(
        adapter=str(tmp_path / "none")
    )


def test_16_and_32_bits_both_ask_for_a_model_that_is_not_quantized(values, tmp_path):
    plain, quantized = (make_tiny_model(tmp_path / name) for name in ("plain", "quantized"))
    model, config = quantize_model(*load_model(quantized), group_size=32, bits=8)
    save_model(quantized, model)
    save_config(config, quantized / "config.json")
    for bits in (16, 32):
        open_session(make_config(values(model_id=str(plain), quant_bits=bits)))
        with pytest.raises(ConfigError, match=f"quant_bits = {bits}, but .* has quantization 8-bit; name another"):
            open_session(make_config(values(model_id=str(quantized), quant_bits=bits)))
    open_session(make_config(values(model_id=str(quantized), quant_bits=8)))
    told = TrainConfig.model_fields["quant_bits"].description or ""
    assert "16 and 32 both say that it is not quantized" in " ".join(told.split())


def test_a_world_model_is_refused_where_the_template_rewrites_what_it_would_predict(rooms, values, tmp_path):
    tokenizer = character_tokenizer(chat_template=THINKING_TEMPLATE)
    model = str(make_tiny_model(tmp_path / "thinking", tokenizer=tokenizer))
    with pytest.raises(
        ConfigError, match=r"echo_alpha = 0\.1 has nothing to predict: .* rewrites .*; set echo_alpha = 0"
    ):
        open_session(make_config(rooms(model_id=model, echo_alpha=0.1)))
    open_session(make_config(rooms(model_id=model, echo_alpha=0.1, use_chat_template=False)))
    # in one turn there is no history, and the field is told to be idle
    assert open_session(make_config(values(model_id=model, echo_alpha=0.1))).inactive[0].startswith("echo_alpha")


def test_prompts_leave_room_for_an_action_in_the_context_of_the_model(values, tmp_path):
    # prompts of 1 to 12 letters in 3 template tokens: 4 to 15 tokens, of a model that takes 8
    model = str(make_tiny_model(tmp_path / "short", max_position_embeddings=8))
    session = open_session(make_config(values(model_id=model)))
    assert {len(group.task.prompt) for group in session.loader.next(12)} == {1, 2, 3, 4}
    full = str(make_tiny_model(tmp_path / "full", max_position_embeddings=4))
    with pytest.raises(ConfigError, match="was made for 4 tokens, which every prompt fills; shorten the prompts"):
        open_session(make_config(values(model_id=full)))
    open_session(make_config(values(model_id=full, max_prompt_len=15, rollout={"max_context": 20})))


def test_a_config_written_as_toml_reads_back_as_it_was(tmp_path):
    configs = [
        make_config({"model_id": "m"}),
        make_config(
            {
                "model_id": "m",
                "env_name": "jsonl",
                "data": {"path": "tasks.jsonl", "eval_fraction": 0.25, "columns": {"answer": "solution"}},
                "rewards": [
                    {"name": "exact_match", "timeout": 2.5},
                    {"name": "my.py:f", "weight": -0.5, "options": {"texts": ["a", "b"], "deep": {"list": [1]}}},
                ],
                "environment": {"seed": 3},
                "chat_template_kwargs": {"enable_thinking": False, "tags": ["a", "b"]},
                "optimizer": {"betas": [0.9, 0.95], "schedule": "cosine", "end_learning_rate": 1e-6},
                "targets": ["q_proj", "layers.*.mlp"],
                "update": {"max_grad_norm": 0},
                "algorithm": {"name": "dr_grpo", "drgrpo_normalize_rewards": True},
                "echo_alpha": 0.01,
                "max_turns": 3,
                "rollout": {"stop": ["\n\n", "."], "weights": "auto", "kv_budget_gb": 1.5, "env_timeout": 0},
            }
        ),
    ]
    for config in configs:
        path = tmp_path / "config.toml"
        path.write_text(config_toml(config))
        assert load_config(path) == config


def test_what_toml_cannot_say_is_the_default_of_no_field_that_has_another():
    # None is written by leaving a field out; so it must be the default wherever it is allowed
    def check(model):
        for name, field in model.model_fields.items():
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            if type(None) in kinds:
                assert field.default is None, name
            for kind in kinds:
                if hasattr(kind, "model_fields"):
                    check(kind)

    check(TrainConfig)


def test_overrides_win_over_the_file_by_dotted_names(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(MODEL + "steps = 5\n[optimizer]\nlearning_rate = 1e-4\nwarmup_steps = 2\n")
    config = load_config(path, {"steps": 7, "optimizer.learning_rate": 2e-4, "sampling.top_k": 9, "model_id": "other"})
    assert (config.steps, config.model_id, config.sampling.top_k) == (7, "other", 9)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (2e-4, 2)
    with pytest.raises(ConfigError, match=r"steps\.x: steps is not a section of the config; set steps as a whole\."):
        load_config(path, {"steps.x": 1})
    path.write_text(path.read_text() + '[[rewards]]\nname = "length"\n')
    with pytest.raises(ConfigError, match=r"rewards\.0\.weight: rewards is not a section .*; set rewards as a whole\."):
        load_config(path, {"rewards.0.weight": 2})
    assert [reward.name for reward in load_config(path, {"rewards": [{"name": "format"}]}).rewards] == ["format"]
    with pytest.raises(ConfigError, match="config error in an option given over the default: group_sise: unknown key"):
        load_config(path, {"group_sise": 1}, source="the default")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps=3", ("steps", 3)),
        ("optimizer.learning_rate = 1e-4", ("optimizer.learning_rate", 1e-4)),
        ("env_name=guess-number", ("env_name", "guess-number")),  # no TOML: text
        ('env_name="a=b"', ("env_name", "a=b")),
        ("gradient_checkpointing=true", ("gradient_checkpointing", True)),
        ("optimizer.betas=[0.9, 0.95]", ("optimizer.betas", [0.9, 0.95])),
    ],
)
def test_an_override_is_read_as_toml_where_it_is_toml(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["steps", "=3"])
def test_an_override_without_a_name_or_a_value_is_refused(text):
    with pytest.raises(ConfigError, match=f"--set takes key=value, got '{text}'"):
        parse_override(text)


def test_the_schema_is_json_and_describes_every_field():
    schema = json.loads(config_schema())
    assert schema["properties"].keys() == TrainConfig.model_fields.keys()
    sections = (
        "optimizer",
        "sampling",
        "algorithm",
        "update",
        "rollout",
        "data",
        "environment",
        "eval",
        "checkpoint",
        "logging",
    )
    for name, field in schema["properties"].items():
        assert "description" in field or name in sections, name
    for name, section in schema["$defs"].items():
        assert all("description" in field for field in section["properties"].values()), name


def test_names_of_algorithms_are_read_in_any_spelling():
    for name in ("drgrpo", "dr_grpo", "dr-grpo", "DR-GRPO"):
        make_config({"model_id": "m", "algorithm": {"name": name, "drgrpo_normalize_rewards": True}})


def test_fields_that_cannot_act_in_a_run_are_told(values, rooms):
    def told(fields):
        return [sentence.split()[0] for sentence in open_session(make_config(fields)).inactive]

    assert told(values()) == []
    one_turn = values(max_observation_len=5, echo_alpha=0.1, max_turns=2, algorithm={"clip_low": 0.1, "clip_high": 0.1})
    assert told(one_turn) == [
        "max_observation_len", "echo_alpha", "max_turns", "algorithm.clip_low", "algorithm.clip_high",
    ]  # fmt: skip
    assert told(values(rollout={"width": 2, "context": "turn"}, rollout_mode="sequential")) == [
        "rollout.width",
        "rollout.context",
    ]
    alone = values(rollout={"kv_budget_gb": 1.0, "deterministic": False, "env_timeout": 0.0}, rollout_mode="sequential")
    assert told(alone) == ["rollout.kv_budget_gb", "rollout.deterministic", "rollout.env_timeout"]
    assert told(rooms(rollout={"kv_budget_gb": 1.0, "deterministic": False, "env_timeout": 0.0})) == []
    assert told(values(algorithm={"name": "gspo", "gspo_importance": "token"})) == ["algorithm.gspo_importance"]
    assert told(rooms(max_turns=2, rollout={"context": "turn"}, eval={"tasks": 20}, max_observation_len=3)) == []
    assert told(rooms(eval={"tasks": 21})) == ["eval.tasks"]
    unknown = {"mood": "glad", "messages_": 1}  # the template of the tiny model has messages and add_generation_prompt
    assert told(values(chat_template_kwargs=unknown)) == ["chat_template_kwargs.mood", "chat_template_kwargs.messages_"]
    assert told(values(chat_template_kwargs={"chat_template": "{{ mood }}", "mood": "glad"})) == []
    assert told(values(optimizer={"warmup_steps": 2, "schedule": "linear"}, steps=2)) == ["optimizer.warmup_steps"]
    assert told(values(optimizer={"warmup_steps": 2, "schedule": "linear"}, steps=3)) == []
    wired_limit_acts = mx.metal.is_available()
    assert told(values(iogpu_wired_limit_mb=100)) == ([] if wired_limit_acts else ["iogpu_wired_limit_mb"])
