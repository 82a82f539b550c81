"""`train` and `eval`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mlxrl.cli.configs import read_config
from mlxrl.cli.planning import plan_of, show_plan
from mlxrl.cli.views import make_view
from mlxrl.policy import adapters_disabled, load_adapter
from mlxrl.train import (
    ConfigError,
    RunError,
    TrainConfig,
    config_toml,
    evaluate,
    fitted_overrides,
    load_config,
    open_session,
    train,
)


def run_train(
    path: Path | None,
    options: Mapping[str, Any],
    settings: Sequence[str],
    *,
    available_memory_gb: float | None,
    dry_run: bool,
    auto_fit: bool,
    resume: bool,
    force: bool,
) -> None:
    """Check the config and its memory, then train with a view fit for where the output goes."""
    console = Console()
    if resume and path is None and "output" in options:
        path = Path(str(options["output"])) / "config.toml"
        if not path.is_file():
            raise RunError(f"{options['output']} holds no run to resume: there is no config.toml.")
    config = read_config(path, options, settings)
    plan = plan_of(config, available_memory_gb)
    if not plan.fit.fits and auto_fit:
        if plan.fit.run is None:
            raise ConfigError(plan.fit.reason)
        settings = [*settings, *(f"{name}={str(value).lower()}" for name, value in fitted_overrides(plan).items())]
        config = read_config(path, options, settings)
        plan = plan_of(config, available_memory_gb)
    if dry_run:
        console.print(config_toml(config), highlight=False, markup=False)
        show_plan(console, plan)
        return
    if not plan.fit.fits:
        changes = ", ".join(f"{name} = {str(value).lower()}" for name, value in fitted_overrides(plan).items())
        advice = f" Set {changes}; --auto-fit does it for you." if plan.fit.run is not None else ""
        if available_memory_gb is not None:
            raise ConfigError(plan.fit.reason + advice)
        Console(stderr=True).print(f"warning: {plan.fit.reason}{advice}", highlight=False)
    for warning in warnings_of(config):
        Console(stderr=True).print(f"warning: {warning}", highlight=False)
    with make_view(console, config) as view:
        train(config, resume=resume, force=force, observer=view)


def run_eval(folder: Path, *, tasks: int, temperature: float) -> None:
    """Print reward and accuracy of the base model and of the run's newest adapter on held-out tasks."""
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder} holds no run: there is no config.toml.")
    config = load_config(folder / "config.toml", {"eval.tasks": tasks, "eval.temperature": temperature})
    session = open_session(config)
    load_adapter(session.model, folder / "adapters")
    curriculum = session.curriculum
    console = Console()

    def play(name: str) -> None:
        outcome = evaluate(
            session.eval_engine, curriculum.suite.make, curriculum.held_out, curriculum.rewards, seed=config.seed
        )
        console.print(
            f"{name:8} accuracy {outcome.accuracy:.3f}  reward {outcome.reward:.3f}  "
            f"{outcome.mean_length:.1f} tokens  ({len(outcome.trajectories)} tasks, temperature {temperature:g})",
            highlight=False,
        )

    with adapters_disabled(session.model):
        play("base")
    play("trained")


def warnings_of(config: TrainConfig) -> list[str]:
    """What runs, but not as one might think."""
    found = []
    sampling = config.sampling
    if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
        found.append(
            "sampling.top_p, top_k or min_p keep part of the vocabulary, so rollouts are not drawn from the policy "
            "that is trained; watch sampling_logp_difference."
        )
    if config.group_size < 4:
        found.append(
            f"group_size = {config.group_size}: in small groups all rewards are often equal, and such a group teaches "
            "nothing; watch frac_reward_zero_std."
        )
    return found
