"""The GPU gates: what a GPU computes agrees with the CPU stream of the same function, and sampling with scoring."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrl.cli.embedded import embedded_model_path
from mlxrl.policy import LoRAConfig, load_policy_with_lora, score
from mlxrl.rollout import Role, SamplingConfig, generate_groups

pytestmark = [
    pytest.mark.metal,
    pytest.mark.cuda,
    pytest.mark.skipif(not mx.is_available(mx.gpu), reason="MLX sees no GPU here"),
]

# Float32 products may run in TF32 on a GPU: 10 bits of mantissa, so of a log-prob of -11 some 0.002 on average, and up
# to 0.018 on an H200.
MEAN_NATS, MOST_NATS = 1e-2, 5e-2


@pytest.fixture(scope="module")
def policy():
    mx.random.seed(0)  # the adapter's first half is drawn from the global state
    model, tokenizer, _ = load_policy_with_lora(embedded_model_path(), LoRAConfig(rank=4, grad_checkpoint=False))
    model.set_dtype(mx.float32)
    return model, tokenizer


def test_log_probs_and_gradients_on_the_gpu_are_those_of_the_cpu(policy):
    model, _ = policy
    token_ids_B_T = np.random.default_rng(0).integers(5, 300, size=(4, 24))
    mask_B_T = np.arange(24)[None] < np.array([24, 13, 7, 2])[:, None]
    mask_B_T[:, 0] = False

    def negative_log_likelihood(model: nn.Module) -> mx.array:
        return -score(model, token_ids_B_T, mask_B_T).logprobs.sum()

    results = {}
    for device in (mx.cpu, mx.gpu):
        with mx.stream(device):
            logprobs_B_T = score(model, token_ids_B_T, mask_B_T).logprobs
            _, gradients = nn.value_and_grad(model, negative_log_likelihood)(model)
            flat = np.concatenate([np.array(gradient).ravel() for _, gradient in tree_flatten(gradients)])
            results[device] = np.array(logprobs_B_T), flat
    (logprobs_cpu, gradient_cpu), (logprobs_gpu, gradient_gpu) = results[mx.cpu], results[mx.gpu]
    difference = np.abs(logprobs_gpu - logprobs_cpu)
    assert difference[mask_B_T].mean() < MEAN_NATS
    assert difference.max() < MOST_NATS
    assert np.linalg.norm(gradient_gpu - gradient_cpu) < 1e-2 * np.linalg.norm(gradient_cpu)


def test_what_the_gpu_samples_it_scores_alike(policy):
    model, tokenizer = policy
    prompts = ["What is 1 + 2?", "What is 3 + 4 + 5 + 6?"]
    sampling = SamplingConfig(temperature=0.7, max_tokens=16)
    trajectories = generate_groups(model=model, tokenizer=tokenizer, prompts=prompts, group_size=4, sampling=sampling)
    assert len(trajectories) == 8
    for segment in (segment for trajectory in trajectories for segment in trajectory.segments):
        mask_T = segment.roles == Role.ACTION
        scored = score(model, segment.token_ids[None], mask_T[None], temperature=0.7).logprobs
        assert mask_T.any()
        difference_T = np.abs(np.array(scored)[0] - segment.sampler_logprobs)[mask_T]
        assert difference_T.mean() < MEAN_NATS
        assert difference_T.max() < MOST_NATS
