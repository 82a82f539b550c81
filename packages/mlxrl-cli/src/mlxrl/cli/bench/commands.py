"""`bench rollout`, `bench multiturn` and `bench update`: who takes part, and what is written."""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Console

from mlxrl.cli.bench import batch_generator, loop, ours, peer
from mlxrl.cli.bench import update as training
from mlxrl.cli.bench.models import BenchPolicy, load_bench_policy
from mlxrl.cli.bench.race import Contestant, ContestantError, InProcess, Outcome, race
from mlxrl.cli.bench.report import report_of, show
from mlxrl.cli.bench.work import (
    MultiturnWork,
    RolloutWork,
    UpdateWork,
    choose_ends,
    declare_ends,
    make_texts,
    make_update_work,
    spread_limits,
)
from mlxrl.cli.configs import check_temperature
from mlxrl.rollout import Engine, SamplingConfig, generate_groups
from mlxrl.train import ConfigError, RunError

# --ends early: rows are a seventh of the limit long on average, 36 tokens of 256.
EARLY = 7
WORDS = {
    "rollout": "{prompts} prompts x {samples} samples, {prompt_len} tokens and up to {max_tokens} more, ends {ends}",
    "multiturn": "{tasks} tasks x {samples} samples, {turns} turns of {max_tokens} tokens",
    "update": "{prompts} prompts x {samples} samples, {prompt_len} tokens and {max_tokens} more that are trained",
}
"""The work of each command in a table's title."""


def run_rollout(settings: dict[str, Any]) -> None:
    """Time completions of plain prompts; `settings` are the command's options by name."""
    ends = settings["ends"]
    if ends not in ("never", "early", "spread"):
        raise ConfigError(f"--ends must be never, early or spread, got {ends!r}.")
    if ends == "spread" and settings["against"] is not None:
        raise ConfigError(
            f"--ends spread gives each row a limit of its own, which {peer.PACKAGE} cannot; leave --against out, or "
            "choose never or early."
        )
    check(settings)
    names = chosen_names("rollout", [loop.NAME, batch_generator.NAME], settings)
    with ExitStack() as stack:
        policy, folder = prepare(stack, settings)
        prompts = make_texts(policy.tokenizer, settings["prompts"], settings["prompt_len"], settings["seed"])
        rows = len(prompts) * settings["samples"]
        work = RolloutWork(
            prompts=prompts,
            prompt_ids=[policy.tokenizer.encode(prompt) for prompt in prompts],
            samples=settings["samples"],
            max_tokens=settings["max_tokens"],
            temperature=settings["temperature"],
            limits=spread_limits(rows, settings["max_tokens"]) if ends == "spread" else None,
        )
        if ends == "early":
            end_early(policy, work, settings["seed"])
        engine = ours.make_engine(policy, work, engine_options(settings))
        makers: dict[str, Callable[[], InProcess]] = {
            loop.NAME: lambda: loop.loop_rollout(policy, work),
            batch_generator.NAME: lambda: batch_generator.batch_generator_rollout(policy, work, engine.width),
        }
        contestants = [
            ours.our_rollout(engine, work, settings["seed"]),
            *(make() for name, make in makers.items() if name in names),
        ]
        compete("rollout", settings, names, contestants, stack, folder, policy, work, engine)


def run_multiturn(settings: dict[str, Any]) -> None:
    """Time episodes; `settings` are the command's options by name."""
    check(settings)
    names = chosen_names("multiturn", [loop.NAME], settings)
    with ExitStack() as stack:
        policy, folder = prepare(stack, settings)
        work = MultiturnWork(
            tasks=make_texts(policy.tokenizer, settings["tasks"], settings["prompt_len"], settings["seed"]),
            samples=settings["samples"],
            turns=settings["turns"],
            max_tokens=settings["max_tokens"],
            temperature=settings["temperature"],
        )
        engine = ours.make_engine(policy, work, engine_options(settings))
        contestants = [ours.our_multiturn(engine, work, settings["seed"])]
        if loop.NAME in names:
            contestants.append(loop.loop_multiturn(policy, work))
        compete("multiturn", settings, names, contestants, stack, folder, policy, work, engine)


def run_update(settings: dict[str, Any]) -> None:
    """Time training steps; `settings` are the command's options by name."""
    check(settings)
    names = chosen_names("update", [training.PLAIN, training.FUSED, training.CHECKPOINTED], settings)
    with ExitStack() as stack:
        policy, folder = prepare(stack, settings)
        sizes = ("prompts", "samples", "prompt_len", "max_tokens", "micro_batch_tokens", "seed")
        work = make_update_work(vocabulary_size(policy), **{name: settings[name] for name in sizes})

        def play(step: Callable[[], float]) -> tuple[int, int | None]:
            step()
            return work.num_tokens, None

        steps = training.update_steps(policy, work)
        contestants = [InProcess(name, partial(play, steps[name])) for name in steps if name in (ours.NAME, *names)]
        compete("update", settings, names, contestants, stack, folder, policy, work)


def chosen_names(command: str, names: list[str], settings: dict[str, Any]) -> list[str]:
    """Who runs beside mlxrl: everyone, or whom `--only` names.

    Raises:
        ConfigError: --against or --only names nobody.
    """
    if settings["against"] is not None:
        peer.check_requirement(settings["against"])
        names = [*names, *map(peer.contestant_name, peer.PATHS[command])]
    for name in settings["only"]:
        if name not in names:
            raise ConfigError(f"--only must be one of {', '.join(names)}, got {name!r}.")
    return settings["only"] or names


def check(settings: dict[str, Any]) -> None:
    """Refuse at once what would fail late.

    Raises:
        ConfigError: --weights is unknown, --temperature too small, or the file of --json cannot be written.
    """
    if settings["json"] not in (None, "-"):
        file = Path(settings["json"])
        try:
            is_new = not file.exists()
            file.open("a").close()
        except OSError as error:
            raise ConfigError(
                f"--json must be - or a file that can be written, got {file}: {error.strerror}."
            ) from None
        if is_new:
            file.unlink()  # a bench that fails leaves none
    check_temperature(settings.get("temperature", 1.0))
    if settings.get("weights") not in (None, "shared", "merged"):
        raise ConfigError(f"--weights must be shared or merged, got {settings['weights']!r}.")


def prepare(stack: ExitStack, settings: dict[str, Any]) -> tuple[BenchPolicy, Path]:
    """The policy, which nothing ends, and a folder for this run's files."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "model").mkdir()
    policy = load_bench_policy(
        settings["model"], settings["shape"], settings["bits"], settings["rank"], folder / "model"
    )
    declare_ends(policy.tokenizer, [])
    return policy, folder


def engine_options(settings: dict[str, Any]) -> dict[str, Any]:
    """The options that are passed on to our engine, where they are given."""
    return {name: settings[name] for name in ("width", "weights") if settings[name] is not None}


def end_early(policy: BenchPolicy, work: RolloutWork, seed: int) -> None:
    """Declare end tokens after which the rows of this work are about a seventh of their limit long."""
    sampling = SamplingConfig(temperature=work.temperature, max_tokens=work.max_tokens)
    trajectories = generate_groups(
        model=policy.model,
        tokenizer=policy.tokenizer,
        prompts=work.prompts,
        group_size=work.samples,
        sampling=sampling,
        seed=seed + 1,  # not the rows that are timed
        use_chat_template=False,
    )
    sampled_B_T = np.array([trajectory.completion_ids for trajectory in trajectories])
    ends = choose_ends(sampled_B_T, work.max_tokens / EARLY, vocabulary_size(policy))
    declare_ends(policy.tokenizer, ends)


def vocabulary_size(policy: BenchPolicy) -> int:
    """Logits of a position."""
    return policy.model(mx.array([[0]])).shape[-1]  # lazy: the shape is known without computing anything


def compete(
    command: str,
    settings: dict[str, Any],
    names: Sequence[str],
    contestants: Sequence[Contestant],
    stack: ExitStack,
    folder: Path,
    policy: BenchPolicy,
    work: RolloutWork | MultiturnWork | UpdateWork,
    engine: Engine | None = None,
) -> None:
    """Run the race and report it; exit code 1 if somebody who was asked for failed."""
    paths = [path for path in peer.PATHS[command] if peer.contestant_name(path) in names]
    others: list[Contestant] = []
    failures: dict[str, str] = {}
    version = None
    console = Console(stderr=settings["json"] == "-")
    with Console(stderr=True).status("") as status:
        if paths:
            status.update(f"installing {settings['against']}")
            try:
                site = peer.install(settings["against"], folder)
                setup = peer.peer_setup(command, policy, work, settings["rank"], settings["seed"])
                process = stack.enter_context(peer.PeerProcess(site, folder / "errors.txt", setup))
            except ContestantError as error:
                failures[settings["against"]] = str(error)
            else:
                version = process.version
                others = [peer.PeerContestant(process, path) for path in paths]
        expected = None if settings.get("ends") == "early" else work.num_tokens
        outcome = race([*contestants, *others], settings["rounds"], status.update, expected_tokens=expected)
    if ours.NAME in outcome.failures:
        raise RunError(f"{ours.NAME} {outcome.failures[ours.NAME]}; there is nothing to compare with.")
    outcome = Outcome(outcome.results, {**failures, **outcome.failures})
    report = report_of(command, settings, policy, outcome, version)
    if engine is not None:
        report["last_rollout"] = asdict(engine.stats)
    show(console, report, _title(report))
    text = json.dumps(report, indent=2) + "\n"
    if settings["json"] == "-":
        print(text, end="")
    elif settings["json"] is not None:
        Path(settings["json"]).write_text(text)
    if outcome.failures:
        sys.exit(1)


def _title(report: dict[str, Any]) -> str:
    settings = report["settings"]
    work = WORDS[report["command"]].format(**settings)
    name = report["model"]["name"]
    return f"bench {report['command']}: {name}, LoRA rank {settings['rank']}; {work}"
