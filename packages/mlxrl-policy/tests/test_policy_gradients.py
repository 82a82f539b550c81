from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

from mlxrl.policy import LoRAConfig, checkpoint_blocks, dropout_active, score, split_head
from mlxrl.policy.head_rows import chunks_with_slopes, recomputed_chunks, row_scorer
from mlxrl.policy.lora import attach_lora


def leaves(tree) -> dict[str, Any]:
    """Arrays by their full names."""
    return dict(tree_flatten(tree))


def weights_like(mask):
    return mx.array(np.random.default_rng(3).normal(size=mask.shape) * mask)


def gradient_of(model, tokens, mask, **options):
    """Value and gradient of a weighted sum of log-probabilities."""
    weights = weights_like(mask)
    value, gradient = nn.value_and_grad(
        model, lambda: (weights * score(model, tokens, mask, **options).logprobs).sum()
    )()
    return value.item(), {name: np.array(leaf) for name, leaf in leaves(gradient).items()}


def plain_gradient_of(model, tokens, mask):
    """The same from the whole model's logits, by autodiff alone."""
    weights = weights_like(mask)[:, 1:]

    def loss():
        logits = model(mx.array(tokens[:, :-1]))
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return (weights * mx.take_along_axis(logprobs, mx.array(tokens[:, 1:, None]), axis=-1)[..., 0]).sum()

    value, gradient = nn.value_and_grad(model, loss)()
    return value.item(), {name: np.array(leaf) for name, leaf in leaves(gradient).items()}


def assert_same(one, other, tolerance=5e-6):
    """Values and gradients agree, the gradients relative to their norm (float32 sums in another order)."""
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-4)
    assert one[1].keys() == other[1].keys()
    difference = np.sqrt(sum(((one[1][name] - other[1][name]) ** 2).sum() for name in one[1]))
    norm = np.sqrt(sum((leaf**2).sum() for leaf in other[1].values()))
    assert norm > 0
    assert difference / norm < tolerance


# Announced or not, a gradient is the same; announced, a frozen head's part comes from the forward pass.
@pytest.mark.parametrize("with_gradient", [False, True])
def test_the_gradient_is_that_of_plain_autodiff_for_any_chunk(policy, architecture, tokens, mask, with_gradient):
    model = policy(architecture)
    plain = plain_gradient_of(model, tokens, mask)
    for chunk_size in (1, 7, None):
        assert_same(gradient_of(model, tokens, mask, chunk_size=chunk_size, with_gradient=with_gradient), plain)


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "cohere"])  # tied, untied, soft cap, logit scale
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_head_passes_the_gradient_on(policy, tokens, mask, architecture, bits, with_gradient):
    model = policy(architecture, bits=bits)
    plain = plain_gradient_of(model, tokens, mask)
    for chunk_size in (1, 7, None):
        assert_same(gradient_of(model, tokens, mask, chunk_size=chunk_size, with_gradient=with_gradient), plain)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_the_gradient_follows_the_temperature_of_each_token(policy, tokens, mask, with_gradient):
    model = policy("gemma2")
    temperature = np.random.default_rng(1).uniform(0.5, 2, tokens.shape)
    weights = weights_like(mask)

    def loss():
        logits = model(mx.array(tokens[:, :-1])) / mx.array(temperature[:, 1:, None].astype(np.float32))
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, mx.array(tokens[:, 1:, None]), axis=-1)[..., 0]
        return (weights[:, 1:] * chosen).sum()

    value, gradient = nn.value_and_grad(model, loss)()
    plain = value.item(), {name: np.array(leaf) for name, leaf in leaves(gradient).items()}
    assert_same(gradient_of(model, tokens, mask, temperature=temperature, with_gradient=with_gradient), plain)


class CountedHead(nn.Module):
    """A head that counts the rows of its products, forward and backward."""

    rows: Any

    def __init__(self, head):
        super().__init__()
        self.head = head
        self.freeze()
        object.__setattr__(self, "rows", Counter())  # nothing of the module's tree

    def __call__(self, hidden):
        @mx.custom_function
        def product(hidden):
            self.rows["forward"] += hidden.shape[-2]
            return self.head(hidden)

        @product.vjp
        def backward(hidden, cotangent, output):
            self.rows["backward"] += hidden.shape[-2]
            return mx.vjp(self.head, [hidden], [cotangent])[1][0]

        return product(hidden)


def test_an_announced_gradient_needs_two_products_with_a_frozen_head_and_scores_alone_need_one(policy, tokens, mask):
    model = policy("llama")
    model.lm_head = CountedHead(model.lm_head)
    score(model, tokens, mask)  # what is compared once a model is compared here

    def rows(run):
        model.lm_head.rows.clear()
        run()
        return Counter(model.lm_head.rows)

    alone = rows(lambda: score(model, tokens, mask))
    assert alone["backward"] == 0
    # beyond what the scores alone name: 14 rows are scored
    announced = rows(lambda: gradient_of(model, tokens, mask, with_gradient=True))
    assert announced - alone == {"backward": 14}
    other = rows(lambda: gradient_of(model, tokens, mask))
    assert other - alone == {"forward": 14, "backward": 14}


def test_in_16_bits_an_announced_gradient_is_as_exact_as_another(policy):
    model = policy("llama")
    model.set_dtype(mx.bfloat16)
    hidden = mx.random.normal((64, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    targets, temperature = mx.arange(64), mx.full((64,), 0.7)
    weights = mx.random.normal((64,), key=mx.random.key(1))

    def slopes(hidden, with_gradient):
        halves = split_head(model)
        assert halves is not None
        if with_gradient:
            run = chunks_with_slopes(halves[1], 16, targets, temperature)
        else:
            recomputed = recomputed_chunks(row_scorer(model, halves[1], []), 16, targets, temperature)
            run = lambda hidden: recomputed([], hidden)  # noqa: E731
        return mx.grad(lambda hidden: (weights * run(hidden)[0]).sum())(hidden)

    announced, other = slopes(hidden, True), slopes(hidden, False)
    assert announced.dtype == other.dtype == mx.bfloat16
    model.set_dtype(mx.float32)  # the same weights, and arithmetic that does not round
    exact = slopes(hidden.astype(mx.float32), False)
    errors = [float(mx.linalg.norm(slope - exact)) / float(mx.linalg.norm(exact)) for slope in (announced, other)]
    assert 1e-4 < errors[1] < 1e-2  # bfloat16 has 8 bits
    assert errors[0] < 1.3 * errors[1]


def adapted(model, owner, leaf, adapter_class):
    adapter = adapter_class.from_base(owner[leaf], r=2, scale=1.0)
    adapter.lora_b = 0.1 * mx.random.normal(adapter.lora_b.shape)
    adapter.freeze()
    adapter.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    adapter.eval()
    owner[leaf] = adapter
    return model


def test_an_adapter_on_the_head_is_trained(policy, tokens, mask):
    model = policy("llama")
    adapted(model, model, "lm_head", LoRALinear)
    plain = plain_gradient_of(model, tokens, mask)
    assert np.abs(plain[1]["lm_head.lora_a"]).max() > 0
    assert np.abs(plain[1]["lm_head.lora_b"]).max() > 0
    for chunk_size in (1, 7, None):
        for with_gradient in (False, True):
            assert_same(gradient_of(model, tokens, mask, chunk_size=chunk_size, with_gradient=with_gradient), plain)


@pytest.mark.parametrize("architecture", ["qwen3", "cohere", "gemma3_text"])
def test_an_adapter_on_a_tied_embedding_is_trained_from_both_ends(policy, tokens, mask, architecture):
    model = policy(architecture)
    adapted(model, model.model, "embed_tokens", LoRAEmbedding)
    plain = plain_gradient_of(model, tokens, mask)
    # ids below 5 stand in no row: only the head's side can reach their rows of lora_a
    assert np.abs(plain[1]["model.embed_tokens.lora_a"][:5]).max() > 0
    for chunk_size in (1, 7, None):
        for with_gradient in (False, True):
            assert_same(gradient_of(model, tokens, mask, chunk_size=chunk_size, with_gradient=with_gradient), plain)


def test_a_head_that_is_trained_itself_gets_its_gradient(policy, tokens, mask):
    model = policy("llama")
    model.lm_head.unfreeze()
    plain = plain_gradient_of(model, tokens, mask)
    assert np.abs(plain[1]["lm_head.weight"]).max() > 0
    for with_gradient in (False, True):
        assert_same(gradient_of(model, tokens, mask, with_gradient=with_gradient), plain)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_the_entropy_carries_no_gradient(policy, tokens, mask, with_gradient):
    model = policy("qwen3")
    entropy = nn.value_and_grad(model, lambda: score(model, tokens, mask, with_gradient=with_gradient).entropy.sum())
    assert not any(mx.any(leaf) for _, leaf in leaves(entropy()[1]).items())


def test_only_scored_positions_send_a_gradient_back(policy, tokens):
    model = policy("qwen3")
    mask = np.zeros_like(tokens)
    mask[1, 6] = 1
    garbage = tokens.copy()
    garbage[1, 7:] = 9  # behind the scored token
    garbage[[0, 2]] = 9  # other rows
    assert_same(gradient_of(model, garbage, mask), gradient_of(model, tokens, mask), 1e-6)
    nearer = tokens.copy()
    nearer[1, 3] = 9  # before it
    one, other = gradient_of(model, nearer, mask), gradient_of(model, tokens, mask)
    assert abs(one[0] - other[0]) > 1e-4


def test_a_constant_weight_of_zero_gives_no_gradient(policy, tokens, mask):
    model = policy("qwen3")
    _, gradient = nn.value_and_grad(model, lambda: (0 * score(model, tokens, mask).logprobs).sum())()
    assert not any(mx.any(leaf) for _, leaf in leaves(gradient).items())


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "qwen3_5", "gemma3_text"])
def test_recomputing_the_blocks_changes_neither_loss_nor_gradient(policy, tokens, mask, architecture):
    kept, recomputed = policy(architecture), policy(architecture, grad_checkpoint=True)
    assert_same(gradient_of(recomputed, tokens, mask), gradient_of(kept, tokens, mask), 1e-6)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_recomputed_blocks_draw_the_same_dropout_masks_again(policy, tokens, mask, architecture):
    kept, recomputed = policy(architecture, dropout=0.5), policy(architecture, dropout=0.5, grad_checkpoint=True)

    def gradient(model):
        with dropout_active(model):
            mx.random.seed(11)
            return gradient_of(model, tokens, mask)

    assert_same(gradient(recomputed), gradient(kept), 1e-6)
    # it was dropout that acted, and the next masks are others
    with dropout_active(recomputed):
        first, second = (gradient_of(recomputed, tokens, mask)[0] for _ in range(2))
    assert first != second


def test_recomputing_is_asked_for_and_taken_back_per_model(policy, tokens):
    one, other = policy("qwen3"), policy("qwen3")
    plain = type(other.layers[0])
    checkpoint_blocks(one)
    checkpoint_blocks(one)  # asking twice is asking once
    assert type(one.layers[0]).__mro__[1] is plain
    assert type(other.layers[0]) is plain
    checkpoint_blocks(one, enabled=False)
    checkpoint_blocks(one, enabled=False)
    assert all(type(block) is plain for block in one.layers)
    assert mx.array_equal(one(mx.array(tokens)), other(mx.array(tokens)))


def test_decoding_goes_on_through_the_cache(policy, tokens):
    kept, recomputed = policy("qwen3_5"), policy("qwen3_5", grad_checkpoint=True)
    read = []
    for model in (kept, recomputed):
        cache = make_prompt_cache(model)
        model(mx.array(tokens[:, :-1]), cache=cache)
        read.append(model(mx.array(tokens[:, -1:]), cache=cache))
    assert mx.array_equal(*read)


def wide_model():
    """One block of width 32 under a head of 32,000 tokens: the head is nearly all there is."""
    arguments = ModelArgs(
        model_type="qwen3", hidden_size=32, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2,
        rms_norm_eps=1e-6, vocab_size=32_000, num_key_value_heads=2, max_position_embeddings=512, rope_theta=1e4,
        head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = Model(arguments)
    attach_lora(model, LoRAConfig(rank=2))
    mx.eval(model.parameters())
    return model


def peak_of_gradient(model, num_tokens, chunk_size, with_gradient):
    tokens = np.arange(num_tokens + 1)[None] % 32_000
    mask = np.ones_like(tokens)
    mask[:, 0] = 0
    options = {"chunk_size": chunk_size, "with_gradient": with_gradient}
    gradient = nn.value_and_grad(model, lambda: score(model, tokens, mask, **options).logprobs.sum())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(gradient())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("with_gradient", [False, True])
def test_the_peak_follows_the_chunk_and_not_the_length(with_gradient):
    model = wide_model()
    short = peak_of_gradient(model, 64, 4, with_gradient)
    long = peak_of_gradient(model, 256, 4, with_gradient)
    whole = peak_of_gradient(model, 256, 256, with_gradient)
    # 256 rows of 32,000 float32 logits are 33 MB, of which a few copies live at a time; a chunk of 4 holds 0.5 MB
    assert whole > 256 * 32_000 * 4
    assert whole > 6 * long  # a 64th of the logits, beside what does not shrink
    assert long < 2 * short  # four times the tokens
