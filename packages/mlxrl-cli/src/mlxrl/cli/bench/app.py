"""The commands of `bench`. What is slow to import is imported when a command runs."""

from typing import Annotated, Any

import typer

bench = typer.Typer(
    help="Time mlxrl against plain loops and other packages, side by side in one run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Samples = Annotated[int, typer.Option(min=1, help="Rows of each prompt or task.")]
PromptLen = Annotated[int, typer.Option(min=1, help="Tokens of a prompt or task.")]
Model = Annotated[str | None, typer.Option(help="Model folder, hub name, or 'embedded', instead of --shape.")]
Shape = Annotated[
    str | None,
    typer.Option(help="Random weights: tiny (the default), tiny-32k, qwen3-0.6b, hybrid-0.8b, small or small-hybrid."),
]
Bits = Annotated[int | None, typer.Option(help="Bits of a --shape's weights: 4, 8, 16 or 32; by default 4, tiny 32.")]
Rank = Annotated[int, typer.Option(min=1, help="Rank of the LoRA adapter on every projection.")]
Temperature = Annotated[float, typer.Option(min=0, max=100, help="Sampling temperature.")]
Rounds = Annotated[int, typer.Option(min=1, help="Counted rounds; one more is played first to warm up.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of prompts and draws.")]
Width = Annotated[int | None, typer.Option(min=1, help="Rows that decode at once, for mlxrl and BatchGenerator.")]
Weights = Annotated[str | None, typer.Option(help="Weights that mlxrl's engine decodes with: shared or merged.")]
Against = Annotated[str | None, typer.Option(help="Another package: inductive-mlxrl, or inductive-mlxrl==VERSION.")]
Only = Annotated[list[str], typer.Option(help="A contestant to run beside mlxrl, instead of all; may be repeated.")]
Json = Annotated[str | None, typer.Option("--json", help="File for everything measured; - is standard output.")]


@bench.command()
def rollout(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts.")] = 8,
    samples: Samples = 8,
    prompt_len: PromptLen = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a row.")] = 256,
    ends: Annotated[
        str,
        typer.Option(
            help="never: all rows draw --max-tokens. early: an end token comes after a seventh of them. "
            "spread: each row has its own limit, evenly over 1 to --max-tokens."
        ),
    ] = "never",
    model: Model = None,
    shape: Shape = None,
    bits: Bits = None,
    rank: Rank = 8,
    temperature: Temperature = 1.0,
    rounds: Rounds = 5,
    seed: Seed = 0,
    width: Width = None,
    weights: Weights = None,
    against: Against = None,
    only: Only = [],  # noqa: B006  (typer reads the default)
    json: Json = None,
) -> None:
    """Completions of plain prompts: sampled tokens a second."""
    settings: dict[str, Any] = dict(locals())
    from mlxrl.cli.bench import commands

    commands.run_rollout(settings)


@bench.command()
def multiturn(
    tasks: Annotated[int, typer.Option(min=1, help="Tasks.")] = 2,
    samples: Samples = 8,
    turns: Annotated[int, typer.Option(min=1, help="Actions of an episode.")] = 3,
    prompt_len: PromptLen = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an action; nothing ends it earlier.")] = 32,
    model: Model = None,
    shape: Shape = None,
    bits: Bits = None,
    rank: Rank = 8,
    temperature: Temperature = 1.0,
    rounds: Rounds = 5,
    seed: Seed = 0,
    width: Width = None,
    weights: Weights = None,
    against: Against = None,
    only: Only = [],  # noqa: B006
    json: Json = None,
) -> None:
    """Episodes of an environment that answers each turn: action tokens a second."""
    settings: dict[str, Any] = dict(locals())
    from mlxrl.cli.bench import commands

    commands.run_multiturn(settings)


@bench.command()
def update(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of an optimizer batch.")] = 4,
    samples: Annotated[int, typer.Option(min=2, help="Completions of each prompt.")] = 8,
    prompt_len: PromptLen = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 32,
    micro_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a pass; mlxrl counts those that its rows share once.")
    ] = None,
    model: Model = None,
    shape: Shape = None,
    bits: Bits = None,
    rank: Rank = 8,
    rounds: Rounds = 5,
    seed: Seed = 0,
    against: Against = None,
    only: Only = [],  # noqa: B006
    json: Json = None,
) -> None:
    """A training step, forward, backward and optimizer: trained tokens a second, and peak memory.

    mlxrl reads what the rows of a prompt share once, and runs the head in chunks. plain does neither, fused the second
    alone; checkpointed does both, and recomputes each block in the backward pass.
    """
    settings: dict[str, Any] = dict(locals())
    from mlxrl.cli.bench import commands

    commands.run_update(settings)


@bench.command()
def memory(
    shapes: Annotated[
        list[str], typer.Option(help="Part of the names of the shapes to measure, instead of all; may be repeated.")
    ] = [],  # noqa: B006
    rank: Rank = 8,
    json: Json = None,
) -> None:
    """Predicted and measured peak memory of rollouts and training steps, for shapes that suit the device."""
    settings: dict[str, Any] = dict(locals())
    from mlxrl.cli.bench.memory import run_memory

    run_memory(settings)
