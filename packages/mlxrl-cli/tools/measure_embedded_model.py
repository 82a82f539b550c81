"""Measures an embedded model as it stands: held-out sums, the share that thinks, and the key-door walk.

python measure_embedded_model.py FOLDER
"""

import argparse
import random
import re

import mlx.core as mx
import mlx.nn as nn
from embedded_corpus import KeyDoorGame, draw_sum_of_kind, sum_question
from mlx_lm import load
from mlx_lm.generate import batch_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

SUMS = 400
SUM_TOKENS = 44
WALKS = 200
WALK_TURNS = 10  # two more than in the corpus
ACTION_TOKENS = 8


def reply(model: nn.Module, tokenizer: TokenizerWrapper, questions: list[str], limit: int, temperature: float):
    """One reply to each question, sampled at `temperature` (0 is greedy)."""
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions
    ]
    sampler = make_sampler(temp=temperature)
    return batch_generate(model, tokenizer, prompts, max_tokens=limit, sampler=sampler).texts


def measure_sums(model: nn.Module, tokenizer: TokenizerWrapper, temperature: float) -> tuple[float, float]:
    """Over held-out sums: the share with one answer, at the end and right, and the share that thinks."""
    rng = random.Random(12345)
    sums = [draw_sum_of_kind(rng, held_out=True) for _ in range(SUMS)]
    texts = reply(model, tokenizer, [sum_question(digits) for digits in sums], SUM_TOKENS, temperature)
    right = 0
    for digits, text in zip(sums, texts, strict=True):
        answers = re.findall(r"<answer>(\d+)</answer>", text)
        right += answers == [str(sum(digits))] and text.endswith("</answer>")
    return right / SUMS, sum("<think>" in text for text in texts) / SUMS


def measure_walks(model: nn.Module, tokenizer: TokenizerWrapper, temperature: float) -> float:
    """The share of key-door walks that open the door, each turn prompted by its observation alone."""
    games = [KeyDoorGame(random.Random(999_000 + walk), max_turns=WALK_TURNS) for walk in range(WALKS)]
    while live := [game for game in games if game.turns_left and not game.won]:
        texts = reply(model, tokenizer, [game.observation for game in live], ACTION_TOKENS, temperature)
        for game, text in zip(live, texts, strict=True):
            action = re.fullmatch(r"<action>([a-z]+)</action>", text)
            game.step(action and action[1])
    return sum(game.won for game in games) / WALKS


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure an embedded model as it stands.")
    parser.add_argument("folder", help="the model's folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    options = parser.parse_args()
    mx.random.seed(options.seed)
    model, tokenizer = load(options.folder)
    print("                        T = 1   greedy")
    sampled, greedy = (measure_sums(model, tokenizer, temperature) for temperature in (1.0, 0.0))
    print(f"held-out sums, right    {sampled[0]:.3f}   {greedy[0]:.3f}")
    print(f"held-out sums, thinks   {sampled[1]:.3f}   {greedy[1]:.3f}")
    walks = [measure_walks(model, tokenizer, temperature) for temperature in (1.0, 0.0)]
    print(f"key-door, opened        {walks[0]:.3f}   {walks[1]:.3f}")


if __name__ == "__main__":
    main()
