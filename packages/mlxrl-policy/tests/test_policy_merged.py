from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from mlxrl.policy import LoRAConfig, MergedPolicy, ModelError, adapters_disabled, flatten_quantized_rows, score
from mlxrl.policy.lora import adapters_of, attach_lora


def leaves(tree) -> dict[str, Any]:
    """Arrays by their full names."""
    return dict(tree_flatten(tree))


def assert_same_logits(merged, model, tokens):
    """Equal but for float32 rounding of logits of a few units, over whole rows and in a step of a cached decode.

    The sums run in another order. Gated-delta layers divide by norms near 0, which makes more of it: such a model is
    as far (2e-4) from its own logits in float64.
    """
    atol = 1e-3 if type(model).__module__.endswith("qwen3_5") else 5e-5
    np.testing.assert_allclose(merged.model(mx.array(tokens)), model(mx.array(tokens)), atol=atol)
    steps = []
    for each in (merged.model, model):
        cache = make_prompt_cache(each)
        each(mx.array(tokens[:, :-1]), cache=cache)
        steps.append(each(mx.array(tokens[:, -1:]), cache=cache))
    np.testing.assert_allclose(*steps, atol=atol)


def assert_same_layers(merged, model):
    """What an adapter and its layer give together, the dense layer gives alone, to 1e-5 of float32 rounding."""
    copies: dict[str, Any] = dict(merged.model.named_modules())
    adapters: Any = adapters_of(model)
    for name, adapter in adapters:
        if "num_experts" in vars(adapter):
            x = mx.random.normal((adapter.num_experts, 1, adapter.lora_a.shape[-1]))
            inputs = [x, mx.arange(adapter.num_experts)]
        else:
            inputs = [mx.random.normal((5, adapter.lora_a.shape[0]))]
        np.testing.assert_allclose(copies[name](*inputs), adapter(*inputs), atol=1e-5)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_the_copy_is_the_policy(policy, architecture, tokens, bits):
    model = policy(architecture, bits=bits)
    merged = MergedPolicy(model)
    assert_same_layers(merged, model)
    assert_same_logits(merged, model, tokens)
    modules = merged.model.modules()
    assert not any("lora_a" in module or "scales" in module for module in modules)
    assert not any(module.training for module in modules)
    assert leaves(merged.model.trainable_parameters()) == {}
    # the same names as a model that was never adapted or quantized
    assert leaves(merged.model.parameters()).keys() == {
        name.replace(".linear.", ".")
        for name in leaves(model.parameters())
        if not name.endswith((".scales", ".biases", ".lora_a", ".lora_b"))
    }


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_modes_without_biases_are_dequantized_too(base, trained, tokens, mode):
    model = base("qwen3_moe")
    # without the embedding: in these modes it gives bfloat16, whatever the model computes in
    linear = (nn.Linear, SwitchLinear)
    group_size = 16 if mode == "nvfp4" else 32
    bits = 8 if mode == "mxfp8" else 4
    nn.quantize(model, group_size, bits, mode=mode, class_predicate=lambda _, module: isinstance(module, linear))
    attach_lora(model, LoRAConfig(rank=4))
    trained(model)
    assert_same_logits(MergedPolicy(model), model, tokens)


def copy_of(model) -> Any:
    """The merged copy as it is built."""
    return MergedPolicy(model).model


class Layers(nn.Module):
    """The least that a model is: a list of layers."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = list(layers)


def test_experts_with_a_scale_each_are_dequantized_by_it():
    experts = SwitchLinear(32, 16, 3)
    experts.weight *= mx.array([1.0, 10.0, 100.0])[:, None, None]
    merged = copy_of(Layers(experts.to_quantized(16, 4, "nvfp4", global_scale=True))).layers[0]
    assert type(merged) is SwitchLinear
    for got, weight in zip(merged.weight, experts.weight, strict=True):
        # 4-bit floats have 1 bit behind the point: at most a quarter of a value is lost, and a tenth overall
        assert float(mx.linalg.norm(got - weight) / mx.linalg.norm(weight)) < 0.15


def test_a_quantized_product_per_head_becomes_dense():
    heads = MultiLinear(32, 16, 3).to_quantized(32, 4)
    x = mx.random.normal((3, 5, 32))
    merged = copy_of(Layers(heads)).layers[0]
    assert type(merged) is MultiLinear
    np.testing.assert_allclose(merged(x), heads(x), atol=1e-5)


@pytest.mark.parametrize(
    ("adapter_class", "bits"),
    [
        *((kind, 0) for kind in (LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear, DoRAEmbedding)),
        *((kind, 4) for kind in (LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear)),
    ],
)
def test_every_class_of_adapter_is_merged(base, put_on, tokens, adapter_class, bits):
    model = base("qwen3_moe")  # tied: the embedding is the head
    put_on(model, adapter_class)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    model.eval()
    merged = MergedPolicy(model)
    assert_same_logits(merged, model, tokens)
    for module in model.modules():
        if "lora_b" in module:
            module.lora_b = -module.lora_b
    assert np.abs(merged.model(mx.array(tokens)) - model(mx.array(tokens))).max() > 0.01
    merged.renew()
    assert_same_logits(merged, model, tokens)


def test_an_adapter_of_another_class_is_refused_by_name():
    class Own(LoRALinear):
        pass

    own = Own(8, 8)
    with pytest.raises(ModelError, match=r"adapter layers\.1 is a Own on a Linear, which cannot be merged"):
        MergedPolicy(Layers(nn.Linear(8, 8), own))


@pytest.mark.parametrize("bits", [0, 4])
def test_the_copy_is_the_policy_of_the_last_renewal(policy, architecture, tokens, bits):
    model = policy(architecture, bits=bits)
    merged = MergedPolicy(model)
    before, layers = leaves(merged.model.parameters()), merged.model.leaf_modules()
    old = np.array(merged.model(mx.array(tokens)))
    for module in model.modules():
        if "lora_b" in module:
            module.lora_b = -module.lora_b
    np.testing.assert_array_equal(merged.model(mx.array(tokens)), old)
    assert np.abs(old - model(mx.array(tokens))).max() > 0.1
    merged.renew()
    assert_same_layers(merged, model)
    assert_same_logits(merged, model, tokens)
    # the layers are those that they were, and only the weights of adapted ones are new arrays
    assert [id(m) for _, m in tree_flatten(merged.model.leaf_modules(), is_leaf=nn.Module.is_module)] == [
        id(m) for _, m in tree_flatten(layers, is_leaf=nn.Module.is_module)
    ]
    adapted = {name.replace(".lora_a", ".weight") for name in leaves(model.parameters()) if name.endswith(".lora_a")}
    after = leaves(merged.model.parameters())
    assert {name for name in after if after[name] is not before[name]} == adapted


def test_the_copy_follows_adapters_that_are_switched_off_and_on_again(policy, tokens):
    model = policy("qwen3")
    merged = MergedPolicy(model)
    with adapters_disabled(model):
        merged.renew()
        assert_same_logits(merged, model, tokens)
        started_off = MergedPolicy(model)
    for copy in (merged, started_off):
        base = np.array(copy.model(mx.array(tokens)))
        assert np.abs(base - model(mx.array(tokens))).max() > 0.01
        copy.renew()
        assert_same_logits(copy, model, tokens)


def everything_of(model):
    """Arrays by identity; classes, modes and frozen names of the modules."""
    arrays = {name: id(value) for name, value in tree_flatten(model) if isinstance(value, mx.array)}
    return arrays, [(type(m), m.training, set(m._no_grad), {**vars(m), "_no_grad": 0}) for m in model.modules()]


@pytest.mark.parametrize("bits", [0, 4])
def test_copying_leaves_the_policy_its_gradient_and_the_random_state_alone(policy, tokens, mask, bits):
    model = policy("qwen3_moe", bits=bits, dropout=0.5, grad_checkpoint=True)

    def gradient():
        return leaves(nn.value_and_grad(model, lambda: score(model, tokens, mask).logprobs.sum())()[1])

    before, things = gradient(), everything_of(model)
    mx.random.seed(3)
    drawn = mx.random.normal((4,))
    mx.random.seed(3)
    merged = MergedPolicy(model)
    merged.renew()
    assert mx.array_equal(mx.random.normal((4,)), drawn)
    assert everything_of(model) == things
    mx.eval(merged.model(mx.array(tokens)))
    after = gradient()
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], value) for name, value in after.items())
    assert all(mx.abs(value).max() > 0 for name, value in after.items() if "gate_proj" in name)


def test_the_copy_of_a_recomputing_or_flattened_policy_is_plain(policy, base, tokens):
    model = policy("qwen3", bits=4, grad_checkpoint=True)
    flatten_quantized_rows(model)
    merged = MergedPolicy(model)
    assert [type(module) for module in merged.model.modules()] == [type(module) for module in base("qwen3").modules()]
    assert_same_logits(merged, model, tokens)


def test_what_the_model_holds_twice_the_copy_holds_twice(policy):
    model = policy("qwen3", bits=4)
    model.layers[1].mlp = model.layers[0].mlp
    copy = copy_of(model)
    assert copy.layers[1].mlp is copy.layers[0].mlp
    assert copy.layers[1].self_attn is not copy.layers[0].self_attn


def test_the_copy_evaluates_while_the_policy_trains(policy):
    model = policy("qwen3", dropout=0.5).train()
    assert not any(module.training for module in copy_of(model).modules())
    assert all(module.training for module in model.modules())


def test_the_copy_of_a_base_shares_its_arrays(base, tokens):
    model = base("qwen3")
    merged = MergedPolicy(model)
    assert merged.nbytes == 0
    assert mx.array_equal(merged.model(mx.array(tokens)), model(mx.array(tokens)))


def test_bytes_are_those_of_adapted_and_quantized_layers_alone(policy):
    model = policy("llama", targets=("self_attn.q_proj",))
    dense = MergedPolicy(model)
    assert dense.nbytes == 2 * 64 * 64 * 4  # float32, one projection in each of two blocks
    assert leaves(dense.model)["model.layers.0.mlp.up_proj.weight"] is model.layers[0].mlp.up_proj.weight
    # q, o 64 * 64, k, v 32 * 64, three of 64 * 128 in two blocks; embedding and head of 101 rows
    quantized = MergedPolicy(policy("llama", bits=4, targets=("self_attn.q_proj",)))
    assert quantized.nbytes == 4 * (2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128) + 2 * 101 * 64)


def half_policy(base, trained, architecture, **options):
    """A 16-bit model as it is loaded on a GPU, with a trained adapter."""
    model = base(architecture, **options)
    attach_lora(model, LoRAConfig(rank=4, scale=1.0))
    return trained(model)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bits", [0, 4])
def test_the_copy_of_a_16_bit_policy_computes_in_float16(base, trained, architecture, tokens, bits, dtype):
    model = half_policy(base, trained, architecture, bits=bits, dtype=dtype)
    merged = MergedPolicy(model)
    assert {value.dtype for value in leaves(merged.model.parameters()).values()} == {mx.float16}
    logits, theirs = merged.model(mx.array(tokens)), model(mx.array(tokens))
    assert logits.dtype == mx.float16
    if architecture == "qwen3_moe":
        return  # MLX multiplies experts in 16 bits on the GPU alone
    mx.eval(theirs)
    model.set_dtype(mx.float32)  # exact: the same parameters, computed with in float32
    exact = model(mx.array(tokens))
    error, their_error = (float(mx.linalg.norm(each.astype(mx.float32) - exact)) for each in (logits, theirs))
    # float16 activations have 3 bits more than bfloat16 ones: 4 to 40 times nearer as measured; else 0.2 to 2.1 times
    assert error < (0.5 if dtype == mx.bfloat16 else 4.0) * their_error


def test_parameters_in_float32_beside_16_bit_ones_stay(base, trained, tokens):
    model = half_policy(base, trained, "qwen3_5", dtype=mx.bfloat16)
    states = [layer.linear_attn for layer in model.layers if layer.is_linear]
    for state in states:
        state.A_log = state.A_log.astype(mx.float32)
    states[0].in_proj_a.linear.weight = states[0].in_proj_a.linear.weight.astype(mx.float32)
    copy = copy_of(model)
    kept = {name for name, value in leaves(copy.parameters()).items() if value.dtype == mx.float32}
    assert {name.rsplit(".", 1)[-1] for name in kept} == {"A_log", "weight"}
    assert len(kept) == len(states) + 1  # and the float32 layer that carries an adapter
    copied = [layer.linear_attn for layer in copy.layers if layer.is_linear]
    assert all(here.A_log is there.A_log for here, there in zip(copied, states, strict=True))
    assert copy(mx.array(tokens)).dtype == mx.float16


def test_the_adapter_of_a_bfloat16_base_does_not_decide_its_type(base, trained):
    model = base("qwen3", dtype=mx.bfloat16)
    attach_lora(model, LoRAConfig(rank=64))  # more float32 values than the base has bfloat16 ones
    assert copy_of(trained(model)).layers[0].mlp.up_proj.weight.dtype == mx.float16


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_dequantizing_is_exact(bits):
    mx.random.seed(2)
    linear = nn.Linear(64, 16, bias=False)
    linear.weight = linear.weight.astype(mx.bfloat16)
    layer: Any = linear if not bits else nn.QuantizedLinear.from_linear(linear, 32, bits)
    attach = LoRALinear.from_base(layer)  # lora_b = 0: the base and nothing else
    # beside more values in float32 than in bfloat16, the copy is float32: no rounding to 16 bits
    got = np.array(copy_of(Layers(attach, nn.RMSNorm(9999))).layers[0].weight)
    assert got.dtype == np.float32
    if not bits:
        expected = np.array(linear.weight.astype(mx.float32))
    else:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        packed = np.array(layer.weight)[..., None] >> shifts & (2**bits - 1)
        scales, biases = (
            np.array(v.astype(mx.float32), dtype=np.float64).repeat(32, 1) for v in (layer.scales, layer.biases)
        )
        expected = packed.reshape(16, 64) * scales + biases  # float64
    np.testing.assert_array_equal(got, expected)


# delta / W, share of a rank-16 delta that the copy keeps, and the error of the copy's delta relative to its size, as
# measured on a 4-bit bfloat16 base 512 wide; rounding to bfloat16 instead has errors of 14.4, 1.8 and 0.2
@pytest.mark.parametrize(("size", "kept", "error"), [(1e-4, 0.46, 0.82), (8e-4, 0.998, 0.26), (8e-3, 1.0, 0.026)])
def test_float16_keeps_a_small_adapter_that_bfloat16_loses(size, kept, error):
    mx.random.seed(0)
    linear = nn.Linear(512, 512, bias=False)
    linear.weight = (mx.random.normal((512, 512)) * 512**-0.5).astype(mx.bfloat16)
    layer: Any = nn.QuantizedLinear.from_linear(linear, 64, 4)
    weight = mx.dequantize(layer.weight, layer.scales.astype(mx.float32), layer.biases.astype(mx.float32), 64, 4)
    adapter = LoRALinear.from_base(layer, r=16, scale=1.0)
    adapter.lora_b = mx.random.normal(adapter.lora_b.shape)
    adapter.lora_b *= size * mx.linalg.norm(weight) / mx.linalg.norm(adapter.lora_a @ adapter.lora_b)
    delta = (adapter.lora_a @ adapter.lora_b).T
    got = copy_of(Layers(adapter)).layers[0].weight
    assert got.dtype == mx.float16

    def error_of(rounded) -> float:
        return float(mx.linalg.norm(rounded.astype(mx.float32) - weight - delta) / mx.linalg.norm(delta))

    share = ((got.astype(mx.float32) - weight) * delta).sum() / (delta * delta).sum()
    assert share.item() == pytest.approx(kept, abs=0.02)
    assert error_of(got) == pytest.approx(error, rel=0.05)
    assert error_of((weight + delta).astype(mx.bfloat16)) > 6 * error_of(got)


def peak_of(work):
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before


def test_no_more_than_a_layer_is_held_in_float32():
    layers = []
    for _ in range(16):
        linear = nn.Linear(256, 256, bias=False)
        linear.weight = linear.weight.astype(mx.bfloat16)
        layers += [nn.QuantizedLinear.from_linear(linear, 64, 4), LoRALinear.from_base(linear, r=2)]
    model = Layers(*layers)
    mx.eval(model.parameters())
    layer = 256 * 256 * 4
    copies: list[MergedPolicy] = []
    built = peak_of(lambda: copies.append(MergedPolicy(model)))
    merged = copies[0]
    assert merged.nbytes == 32 * layer / 2
    assert merged.nbytes <= built < merged.nbytes + 4 * layer
    assert peak_of(merged.renew) < 4 * layer  # of 16 that carry an adapter
