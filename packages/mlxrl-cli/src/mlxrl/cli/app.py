"""The commands. What is slow to import is imported when a command runs, so that --help answers at once."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlxrl.cli.bench import bench

app = typer.Typer(
    help="Reinforcement learning of language models on MLX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench, name="bench")

Config = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; without one, the embedded default.")]
Settings = Annotated[list[str], typer.Option("--set", help="KEY=VALUE for any field of the config; may be repeated.")]
Model = Annotated[str | None, typer.Option(help="Model folder, hub name, or 'embedded'.")]
Memory = Annotated[float | None, typer.Option(help="Memory the run may take, in GB (2^30 bytes).")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]


@app.command()
def train(
    config: Config = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer batches.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Samples of each task.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an action (max_completion_len).")] = None,
    algorithm: Annotated[str | None, typer.Option(help="Objective (algorithm.name).")] = None,
    beta: Annotated[float | None, typer.Option(help="Weight of the KL to the base model (kl_beta).")] = None,
    seed: Seed = None,
    model: Model = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Run folder.")] = None,
    available_memory_gb: Memory = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show config and memory plan, and stop.")] = False,
    auto_fit: Annotated[bool, typer.Option("--auto-fit", help="Turn the run down until it fits the memory.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of --output.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that is in --output.")] = False,
    set_: Settings = [],  # noqa: B006  (typer reads the default)
) -> None:
    """Train a policy. Options win over the config file."""
    from mlxrl.cli import training

    options = {
        "steps": steps,
        "group_size": group_size,
        "max_completion_len": max_tokens,
        "algorithm.name": algorithm,
        "kl_beta": beta,
        "seed": seed,
        "model_id": model,
        "output": output,
    }
    training.run_train(
        config,
        {name: value for name, value in options.items() if value is not None},
        set_,
        available_memory_gb=available_memory_gb,
        dry_run=dry_run,
        auto_fit=auto_fit,
        resume=resume,
        force=force,
    )


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    tasks: Annotated[int, typer.Option(min=1, help="Held-out tasks, each played once.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="Sampling temperature; 0 is greedy.")] = 0.0,
) -> None:
    """Play held-out tasks with the base model and with a run's newest adapter."""
    from mlxrl.cli import training

    training.run_eval(run, tasks=tasks, temperature=temperature)


@app.command()
def plan(
    config: Config = None,
    available_memory_gb: Memory = None,
    model: Model = None,
    set_: Settings = [],  # noqa: B006
) -> None:
    """Predict a run's memory from the model's config.json, and say what to turn down; exit code 1 if it is too much."""
    from mlxrl.cli import planning

    planning.run_plan(config, {} if model is None else {"model_id": model}, set_, available_memory_gb)


@app.command()
def init(
    path: Annotated[Path | None, typer.Argument(help="File to write; without one, the config is printed.")] = None,
    example: Annotated[str | None, typer.Option(help="A shipped example instead of a commented default.")] = None,
    list_examples: Annotated[bool, typer.Option("--list", help="Name the shipped examples.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="The config's JSON schema instead.")] = False,
) -> None:
    """Write a config to start from."""
    from mlxrl.cli import starting

    starting.run_init(path, example=example, list_examples=list_examples, schema=schema)


@app.command()
def envs(
    name: Annotated[str | None, typer.Argument(help="Environment to play; without one, all are listed.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Task to play: its id, or its number among those to train on.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the environment, and of --random.")] = 0,
    at_random: Annotated[bool, typer.Option("--random", help="Draw the actions instead of asking for them.")] = False,
    set_: Annotated[list[str], typer.Option("--set", help="OPTION=VALUE of the environment; may be repeated.")] = [],  # noqa: B006
) -> None:
    """List the environments, or play an episode of one: a name, LIBRARY:NAME, or path/to/file.py:factory."""
    from mlxrl.cli import envs
    from mlxrl.env.adapters import LIBRARIES

    if name is None:
        envs.run_list()
    elif name in LIBRARIES:
        envs.run_library(name)
    else:
        envs.run_episode(name, set_, task=task, seed=seed, at_random=at_random)


@app.command()
def smoke(
    model: Model = None,
    architecture: Annotated[str | None, typer.Option(help="A tiny random model of this type instead.")] = None,
) -> None:
    """Gate: load a model, attach LoRA, sample, take a step, and reload the adapter in stock mlx-lm."""
    from mlxrl.cli import gates

    gates.smoke(model, architecture)


@app.command()
def toy_gate(
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the run.")] = 0,
    steps: Annotated[int, typer.Option(min=10, help="Optimizer batches.")] = 30,
) -> None:
    """Gate: the embedded default learns; the mean reward rises by at least 0.3."""
    from mlxrl.cli import gates

    gates.toy_gate(seed, steps)


@app.command()
def equivalence(
    model: Model = None,
    architecture: Annotated[str | None, typer.Option(help="A tiny random model of this type instead.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the samples.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens a completion.")] = 24,
) -> None:
    """Gate: the engine draws what a plain loop without cache or batch draws, token for token."""
    from mlxrl.cli import gates

    gates.equivalence(model, architecture, seed, temperature, max_tokens)


@app.command()
def gsm8k(
    model: Model = None,
    data: Annotated[Path | None, typer.Option(help="GSM8K as JSON lines (question, answer).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer batches.")] = 1,
    tasks: Annotated[int, typer.Option(min=1, help="Held-out questions before and after.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Run folder.")] = None,
) -> None:
    """Gate: train on grade-school word problems and compare the held-out accuracy before and after."""
    from mlxrl.cli import gates

    gates.gsm8k(model, data, steps, tasks, max_tokens, output)


for _command, _alias in (
    (smoke, "phase0-smoke"),
    (toy_gate, "phase1-toy-gate"),
    (gsm8k, "phase1-gsm8k"),
    (equivalence, "phase2-equivalence"),
):
    app.command(_alias, hidden=True)(_command)


def main() -> None:
    """Run a command; an error that a user can mend is one message, exit code 2 before a run and 1 in it."""
    try:
        app()
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        sys.stderr.write(f"{error}\n")
        sys.exit(code)


def exit_code(error: Exception) -> int | None:
    """2 for a config or a machine that cannot run, 1 for a run that broke, None for a fault of ours."""
    if isinstance(error, ImportError) and importlib.util.find_spec("mlx") is None:
        return 2
    if "mlxrl.train" not in sys.modules:
        return None
    from mlxrl.policy import ModelError
    from mlxrl.train import ConfigError, RewardError, RunError, RunFolderError

    if isinstance(error, ConfigError | ModelError | RunFolderError):
        return 2
    return 1 if isinstance(error, RunError | RewardError) else None
