"""mlx-lm's own continuous batching."""

from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlxrl.cli.bench.models import BenchPolicy
from mlxrl.cli.bench.race import InProcess
from mlxrl.cli.bench.work import RolloutWork

NAME = "batch-generator"


def batch_generator_rollout(policy: BenchPolicy, work: RolloutWork, width: int) -> InProcess:
    """Every row is a prompt of its own; `width` rows decode at once."""
    prompts = [list(ids) for ids in work.prompt_ids for _ in range(work.samples)]
    stop_tokens = [[token] for token in policy.tokenizer.eos_token_ids]

    def play() -> tuple[int, int | None]:
        generator = BatchGenerator(
            policy.model,
            stop_tokens=stop_tokens,
            sampler=make_sampler(temp=work.temperature),
            completion_batch_size=width,
        )
        rows = {uid: [] for uid in generator.insert(prompts, list(work.row_limits))}
        while responses := generator.next_generated():
            for response in responses:
                rows[response.uid].append(response.token)
        generator.close()
        return sum(map(len, rows.values())), None

    return InProcess(NAME, play)
