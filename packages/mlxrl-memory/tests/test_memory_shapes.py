"""Parameter counts and bytes of weights against totals derived by hand."""

import json

import pytest

from mlxrl.memory import ModelShape, known_config

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
# Two blocks of: q, o 2 * 64*64; k, v 2 * 64*32; gate, up, down 3 * 64*128; norms 2 * 64
DENSE_BLOCK = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
DENSE_TOTAL = 2 * 100 * 64 + 2 * DENSE_BLOCK + 64


def shape(**changes):
    return ModelShape.from_config(DENSE | changes)


def known(model_id):
    config = known_config(model_id)
    assert config is not None
    return ModelShape.from_config(config)


def test_qwen3_600m_has_the_published_parameter_count():
    # embedding (tied)                        151936 * 1024 = 155,582,464
    # per block: q and o  2 * 1024 * 2048 = 4,194,304; k and v 2 * 1024 * 1024 = 2,097,152
    #            gate, up, down 3 * 1024 * 3072 = 9,437,184; norms 2 * 1024 + 2 * 128 = 2,304   sum 15,730,944
    # 28 blocks 440,466,432; last norm 1,024
    assert known("Qwen/Qwen3-0.6B").parameters == 155_582_464 + 28 * 15_730_944 + 1_024 == 596_049_920


def test_qwen3_5_9b_has_the_published_parameter_count():
    # embedding and head 2 * 248320 * 4096; MLP 3 * 4096 * 12288 and two norms in each of 32 blocks
    tables, mlp = 2 * 248320 * 4096, 3 * 4096 * 12288 + 2 * 4096
    # 24 gated-delta mixers: qkv to 2 * 16*128 + 32*128 = 8192; z and out 4096; b and a 32; conv 4 taps; A, dt; norm
    delta = 4096 * 8192 + 2 * 4096 * 4096 + 2 * 4096 * 32 + 8192 * 4 + 2 * 32 + 128
    # 8 full attentions: q with its gate 2 * 16*256 = 8192; k, v 4*256 = 1024; o; q and k norms
    full = 4096 * 8192 + 2 * 4096 * 1024 + 4096 * 4096 + 2 * 256
    expected = tables + 32 * mlp + 24 * delta + 8 * full + 4096
    assert known("Qwen/Qwen3.5-9B").parameters == expected == 8_953_803_264


def test_an_untied_dense_model_counts_its_head_and_a_tied_one_does_not():
    assert shape().parameters == DENSE_TOTAL
    assert shape(tie_word_embeddings=True).parameters == DENSE_TOTAL - 100 * 64


def test_qwen2_adds_biases_to_queries_keys_and_values():
    # 64 + 32 + 32 bias elements in each of two blocks
    assert shape(model_type="qwen2").parameters == DENSE_TOTAL + 2 * 128


def test_gemma2_has_four_norms_a_block_and_a_tied_head():
    assert shape(model_type="gemma2", tie_word_embeddings=None).parameters == DENSE_TOTAL - 100 * 64 + 2 * 2 * 64


def test_phi_has_one_norm_an_ungated_mlp_and_biases_everywhere():
    # block: q, o 2 * 64*64, k, v 2 * 64*32, fc1, fc2 2 * 64*128; biases 64+32+32+64 and 128+64; one norm 2 * 64
    block = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 128 + 192 + 192 + 128
    # tables 2 * 100*64, head bias 100, last norm 2 * 64
    assert shape(model_type="phi").parameters == 2 * 100 * 64 + 100 + 2 * block + 128


def test_a_mixture_counts_every_expert_its_router_and_the_shared_expert():
    mixture = shape(
        model_type="qwen2_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    )
    # in place of 3 * 64*128: router 64*8, experts 8 * 3 * 64*32, shared 3 * 64*48 and its gate 64; q, k, v biases 128
    block = DENSE_BLOCK - 3 * 64 * 128 + 64 * 8 + 8 * 3 * 64 * 32 + 3 * 64 * 48 + 64 + 128
    assert mixture.parameters == 2 * 100 * 64 + 2 * block + 64


def test_blocks_named_in_mlp_only_layers_stay_dense():
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    both, one = shape(model_type="qwen3_moe", **moe), shape(model_type="qwen3_moe", mlp_only_layers=[0], **moe)
    # one mixture (router 64*8, experts 8 * 3 * 64*32) becomes one dense feed-forward
    assert both.parameters - one.parameters == 64 * 8 + 8 * 3 * 64 * 32 - 3 * 64 * 128


def test_layer_types_and_the_interval_describe_the_same_hybrid():
    hybrid = {
        "model_type": "qwen3_5",
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_hidden_layers": 4,
    }
    named = shape(**hybrid, layer_types=["linear_attention"] * 3 + ["full_attention"])
    assert named.blocks == shape(**hybrid, full_attention_interval=4).blocks
    assert [block.delta is None for block in named.blocks] == [False, False, False, True]


def test_four_bits_in_groups_of_64_take_four_and_a_half_bits_an_element():
    # 16-bit scale and bias per 64 elements: 4 + 32 / 64 bits; the five norms of 64 stay in bfloat16
    packed = shape(quantization={"group_size": 64, "bits": 4})
    assert packed.weight_bytes == (DENSE_TOTAL - 5 * 64) * 9 // 16 + 5 * 64 * 2
    assert shape(dtype="bfloat16").weight_bytes == 2 * DENSE_TOTAL
    assert shape(torch_dtype="float32").weight_bytes == 4 * DENSE_TOTAL


def test_one_eight_bit_scale_per_group_of_32_in_mxfp4():
    packed = shape(quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"})
    assert packed.weight_bytes == (DENSE_TOTAL - 5 * 64) * (128 + 8) // 256 + 5 * 64 * 2


def test_a_layer_with_its_own_quantization_is_counted_with_it():
    own = {"group_size": 64, "bits": 4, "model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 8}, "lm_head": False}
    plain = shape(quantization={"group_size": 64, "bits": 4})
    # down_proj: 64*128 elements at 4 more bits; lm_head: 100*64 elements at 16 instead of 4.5 bits
    assert shape(quantization=own).weight_bytes - plain.weight_bytes == 64 * 128 * 4 // 8 + 6400 * 23 // 16


def test_a_merged_copy_holds_what_is_adapted_packed_or_cast():
    linears, tables = 2 * (DENSE_BLOCK - 2 * 64), 2 * 100 * 64
    packed = {"quantization": {"group_size": 64, "bits": 4}}
    # the linear layers of the blocks are adapted; in 16 bits both copies are float16
    assert shape(dtype="float32").merged_copy_bytes == 4 * linears
    assert shape(dtype="float16").merged_copy_bytes == 2 * linears
    # packed tables become dense, a head that was never packed stays the model's own
    assert shape(dtype="float32", **packed).merged_copy_bytes == 4 * (linears + tables)
    unpacked = {"quantization": packed["quantization"] | {"lm_head": False}}
    assert shape(dtype="float16", **unpacked).merged_copy_bytes == 2 * (linears + tables // 2)
    # bfloat16 is cast to float16, norms and all
    assert shape(dtype="bfloat16").merged_copy_bytes == shape(**packed).merged_copy_bytes == 2 * DENSE_TOTAL


def test_lora_pairs_sit_on_every_linear_layer_of_every_block():
    # inputs + outputs: q, o 128 each; k, v 96 each; gate, up, down 192 each; rank 4, two blocks
    assert shape().lora_parameters(4) == 2 * 4 * (2 * 128 + 2 * 96 + 3 * 192)
    # DoRA has a magnitude for each output: q, o 64, k, v 32, gate, up 128, down 64
    assert shape().lora_parameters(4, use_dora=True) - shape().lora_parameters(4) == 2 * (
        2 * 64 + 2 * 32 + 2 * 128 + 64
    )


def test_adapters_may_sit_on_some_layers_alone():
    whole = shape(dtype="float32")
    last_mlp = whole.adapting(lambda block, name: block == 1 and name.startswith("mlp."))
    assert last_mlp.lora_parameters(4) == 4 * 3 * 192
    assert last_mlp.parameters == whole.parameters
    assert whole.adapting(lambda block, name: True) == whole
    assert whole.adapting(lambda block, name: False).lora_parameters(4) == 0
    # a merged copy of a model that is not cast shares what is not adapted
    assert last_mlp.merged_copy_bytes == 4 * 3 * 64 * 128


def test_a_config_is_read_from_a_folder_and_from_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert ModelShape.from_path(tmp_path) == ModelShape.from_path(tmp_path / "config.json") == shape()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path must be a model's folder or its config\.json.*nowhere"):
        ModelShape.from_path(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="must hold"):
        ModelShape.from_path(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "must hold 'hidden_size'"),
        ({"hidden_size": 0}, "'hidden_size' must be a whole number of at least 1, got 0"),
        ({"vocab_size": "many"}, "'vocab_size' must be a whole number of at least 1, got 'many'"),
        ({"num_experts": 4}, "must hold 'num_experts_per_tok'"),
        (
            {"layer_types": ["mamba", "full_attention"]},
            "'layer_types' names 'mamba', which is not counted yet; measure",
        ),
        ({"layer_types": ["full_attention"]}, "'layer_types' must name num_hidden_layers = 2 .*got 1"),
        ({"kv_lora_rank": 512}, "'kv_lora_rank' .512.* latent attention"),
        ({"dtype": "int3"}, "'dtype' must be one of .* got 'int3'"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false, got 'yes'"),
        ({"quantization": {"bits": 7}}, r"'quantization\.bits' must be one of .* got 7"),
        ({"quantization": {"bits": 4, "group_size": 0}}, r"'quantization\.group_size' must be .* got 0"),
        ({"quantization": 4}, "'quantization' must be an object with bits, got 4"),
    ],
)
def test_a_broken_config_is_refused_with_field_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        shape(**changes)


def test_known_configs_ignore_the_organisation_and_read_the_bits():
    plain, packed = known_config("Qwen/Qwen3-0.6B"), known_config("mlx-community/Qwen3-0.6B-4bit")
    assert plain is not None
    assert "quantization" not in plain
    assert packed == {**plain, "quantization": {"group_size": 64, "bits": 4}}
    eight = known_config("someone/qwen3.5-9b-mlx-8bit")
    assert eight is not None
    assert eight["quantization"]["bits"] == 8


@pytest.mark.parametrize(
    "model_id", ["", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B-Reranker", "x/Qwen3-0.6B-7bit", "Qwen3-0.6Beta"]
)
def test_other_models_are_not_known(model_id):
    assert known_config(model_id) is None
