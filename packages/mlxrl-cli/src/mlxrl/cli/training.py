"""`train` and `eval`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mlxrl.cli.configs import parse_settings, read_config
from mlxrl.cli.planning import changes_of, plan_of, show_plan
from mlxrl.cli.views import make_view, measured, tasks_played
from mlxrl.policy import adapters_disabled
from mlxrl.rollout import SamplingConfig
from mlxrl.train import (
    ConfigError,
    RunFolderError,
    TrainConfig,
    UnplannedError,
    config_toml,
    evaluate,
    fitted_overrides,
    load_config,
    located_config,
    make_curriculum,
    open_session,
    resumed_config,
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
    console = Console(emoji=False)
    if resume and force:
        raise ConfigError("--resume goes on with a run and --force replaces it; give one of them.")

    def read(changes: Mapping[str, Any]) -> TrainConfig:
        fields = {**options, **parse_settings(settings), **changes}
        saved = resume and path is None and "output" in fields
        config = resumed_config(str(fields["output"]), fields) if saved else read_config(path, fields, [])
        return located_config(config, resume=resume)

    config = read({})
    curriculum = make_curriculum(config)
    try:
        plan = plan_of(config, curriculum, available_memory_gb)
    except UnplannedError as error:
        if dry_run or auto_fit or available_memory_gb is not None:
            asked = "--dry-run, --auto-fit and --available-memory-gb"
            raise UnplannedError(f"{error} Without {asked} it is trained unplanned.") from error
        warn(f"whether this run fits the memory is not known: {error}")
        plan = None
    if plan is not None and not plan.fit.fits and auto_fit:
        if plan.fit.run is None:
            raise ConfigError(plan.fit.reason)
        config = read(fitted_overrides(plan))
        warn(f"to fit the memory, {', '.join(changes_of(plan))}")
        curriculum = make_curriculum(config)
        plan = plan_of(config, curriculum, available_memory_gb)
    if plan is not None and dry_run:
        console.print(config_toml(config), highlight=False, markup=False)
        show_plan(console, plan)
        return
    if plan is not None and not plan.fit.fits:
        changes = ", ".join(changes_of(plan))
        advice = f" Set {changes}; --auto-fit does it for you." if plan.fit.run is not None else ""
        if available_memory_gb is not None:
            raise ConfigError(plan.fit.reason + advice)
        warn(plan.fit.reason + advice)
    for warning in warnings_of(config):
        warn(warning)
    with make_view(console, config) as view:
        train(
            config,
            resume=resume,
            force=force,
            observer=view,
            available_bytes=None if plan is None else plan.fit.budget,
            curriculum=curriculum,
        )


def run_eval(folder: Path, *, tasks: int, temperature: float) -> None:
    """Print reward and accuracy of the base model and of the run's newest adapter on held-out tasks."""
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{folder} holds no run: there is no config.toml.")
    # the policy itself is asked, with and without its adapter: a merged copy is rounded, and would be made for each
    fields = {"eval.tasks": tasks, "eval.temperature": temperature, "rollout.weights": "shared"}
    config = load_config(folder / "config.toml", fields)
    adapter = folder / "adapters"
    if not adapter.is_dir():
        raise RunFolderError(f"{folder} has no checkpoint yet; go on with train --resume.")
    session = open_session(config, adapter=adapter)  # whatever has become of the one that the run started from
    curriculum = session.curriculum
    console = Console(emoji=False)

    def play(name: str) -> None:
        outcome = evaluate(
            session.engine,
            curriculum.suite.make,
            curriculum.held_out,
            curriculum.rewards,
            seed=config.seed,
            sampling=session.eval_sampling,
        )
        console.print(
            f"{name:8} accuracy {measured(outcome.accuracy)}  reward {measured(outcome.reward)}  "
            f"{outcome.mean_length:.1f} tokens  ({tasks_played(outcome)}, temperature {temperature:g})",
            highlight=False,
            soft_wrap=True,
        )
        if errors := [trajectory.error for trajectory in outcome.trajectories if trajectory.failed]:
            warn(f"{len(errors)} of the tasks failed; the first: {errors[0]}")

    with adapters_disabled(session.model):
        play("base")
    play("trained")


def warn(text: str) -> None:
    """A warning on standard error, one line."""
    Console(stderr=True, emoji=False).print(f"warning: {text}", highlight=False, markup=False, soft_wrap=True)


def warnings_of(config: TrainConfig) -> list[str]:
    """What runs, but not as one might think."""
    found = []
    if not SamplingConfig(**config.sampling.model_dump()).full_support:
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
