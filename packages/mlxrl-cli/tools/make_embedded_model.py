"""Makes the embedded model from nothing: corpus, tokenizer, pretraining, and a folder that `mlx_lm.load` reads.

    python make_embedded_model.py --out model

The README beside this file says what the model is for and how long this takes.
"""

import argparse
import json
import random
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from embedded_corpus import Chat, draw_chat
from embedded_tokenizer import save_tokenizer, train_tokenizer
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3
from mlx_lm.utils import quantize_model, save_config
from transformers import PreTrainedTokenizerFast

STEPS = 3000
WARMUP = 100
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.05
CHATS_PER_STEP = {"sum": 64, "guess": 20, "keydoor": 10}
ROWS_PER_BATCH = 16  # small enough that little is padding
OTHER_WEIGHT = 0.1  # loss weight of a token that the assistant does not say
QUANTIZED_GROUP = 32
REPORT_EVERY = 50
SECONDS_PER_STEP = 0.6  # on one core of a 2020s server, with OpenBLAS


def model_config(tokenizer: PreTrainedTokenizerFast) -> dict:
    """A three-layer Qwen3. No vocabulary entry beyond the tokenizer's: a sampled spare id could not be decoded."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def new_model(config: dict) -> qwen3.Model:
    """Normal weights: 0.02 in the embedding, 1/sqrt(inputs) in a projection, less in those that end a branch."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))

    def draw(path: str, weight: mx.array) -> mx.array:
        if weight.ndim == 1:  # norms start at one
            return weight
        scale = 0.02 if path == "model.embed_tokens.weight" else weight.shape[1] ** -0.5
        if path.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= (2 * config["num_hidden_layers"]) ** 0.5
        return scale * mx.random.normal(weight.shape)

    model.update(tree_map_with_path(draw, model.parameters()))
    return model


def encode(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> tuple[list[int], list[float]]:
    """The tokens of a chat as its template renders it, and the loss weight of each."""
    tokens, weights = [], []
    for role, text in chat:
        spoken = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        tokens += [tokenizer.convert_tokens_to_ids(f"<|{role}|>"), *spoken]
        weights += [OTHER_WEIGHT] + [1.0 if role == "assistant" else OTHER_WEIGHT] * len(spoken)
    return tokens, weights


def draw_batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[tuple[mx.array, mx.array]]:
    """The chats of one step as tokens [B, T] and loss weights [B, T]; rows of like length share a batch."""
    chats = [draw_chat(rng, task) for task, count in CHATS_PER_STEP.items() for _ in range(count)]
    rows = sorted((encode(tokenizer, chat) for chat in chats), key=lambda row: len(row[0]))
    batches = []
    for start in range(0, len(rows), ROWS_PER_BATCH):
        batch = rows[start : start + ROWS_PER_BATCH]
        width = len(batch[-1][0])
        tokens = [tokens + [tokenizer.pad_token_id] * (width - len(tokens)) for tokens, _ in batch]
        weights = [weights + [0.0] * (width - len(weights)) for _, weights in batch]
        batches.append((mx.array(tokens), mx.array(weights)))
    return batches


def weighted_loss(model: nn.Module, batches: list[tuple[mx.array, mx.array]]) -> mx.array:
    """The weighted mean of the next-token cross-entropy over all tokens of all batches."""
    total, weight = mx.array(0.0), mx.array(0.0)
    for tokens_B_T, weights_B_T in batches:
        losses_B_T = nn.losses.cross_entropy(model(tokens_B_T[:, :-1]), tokens_B_T[:, 1:], reduction="none")
        total += (losses_B_T * weights_B_T[:, 1:]).sum()
        weight += weights_B_T[:, 1:].sum()
    return total / weight


def pretrain(model: nn.Module, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> None:
    """AdamW with warm-up and a cosine down to a fiftieth; every step draws fresh chats of each task."""
    rng = random.Random(seed)
    warmup = min(WARMUP, steps // 2)
    rate = optim.join_schedules(
        [
            optim.linear_schedule(0.0, LEARNING_RATE, warmup),
            optim.cosine_decay(LEARNING_RATE, steps - warmup, LEARNING_RATE / 50),
        ],
        [warmup],
    )
    optimizer = optim.AdamW(rate, betas=[0.9, 0.98], weight_decay=WEIGHT_DECAY, bias_correction=True)
    loss_and_gradient = nn.value_and_grad(model, weighted_loss)
    start = time.monotonic()
    for step in range(1, steps + 1):
        loss, gradient = loss_and_gradient(model, draw_batches(tokenizer, rng))
        gradient, _ = optim.clip_grad_norm(gradient, 1.0)
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state, loss)  # one optimizer step: its graph ends here
        if step % REPORT_EVERY == 0:
            left = (steps - step) * (time.monotonic() - start) / step / 60
            print(f"step {step} of {steps}  loss {loss.item():.3f}  {left:.0f} minutes left", flush=True)


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerFast, config: dict, folder: Path) -> None:
    """The folder in the format of mlx-lm: weights, both configs, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    save_config(config, folder / "config.json")
    generation = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(tokenizer, folder)


def make(out: Path, seed: int, steps: int, quantize: int | None) -> None:
    """Pretrains the model for `steps` steps and writes it to `out`, with `quantize` bits a weight if that is given."""
    mx.random.seed(seed)
    tokenizer = train_tokenizer()
    config = model_config(tokenizer)
    model = new_model(config)
    pretrain(model, tokenizer, seed, steps)
    if quantize:
        model, config = quantize_model(model, config, QUANTIZED_GROUP, quantize)
    save_model(model, tokenizer, config, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded model from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the corpus")
    parser.add_argument("--steps", type=int, default=STEPS, help="pretraining steps")
    parser.add_argument("--quantize", type=int, choices=(4, 8), help="bits a weight; float32 without it")
    options = parser.parse_args()
    minutes = options.steps * SECONDS_PER_STEP / 60
    print(f"about {minutes:.0f} minutes of one CPU core with OpenBLAS preloaded, five times that without")
    make(options.out, options.seed, options.steps, options.quantize)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
