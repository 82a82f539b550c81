"""The embedded model's tokenizer: byte-level pairs learned from its own corpus, 326 entries, and the chat template."""

import json
import random
from pathlib import Path

from embedded_corpus import draw_chat
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# One token each, and ordinary text: they survive decoding, so that rewards and environments can read them.
TAG_TOKENS = ["<think>", "</think>", "<answer>", "</answer>", "<action>", "</action>"]
LEARNED_SIZE = 320  # five special tokens, 256 bytes and 59 merges; the six tags come on top

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Digits stand alone, a word takes its leading space along, and so does a run of signs.
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"

# The tokenizer does not follow the seed of the pretraining: every model that the recipe makes has the same one.
SAMPLE_SEED = 0
SAMPLE_CHATS = 300


def sample_texts() -> list[str]:
    """What the merges are learned from: chats of every task, without the tags, and the words of a system message."""
    rng = random.Random(SAMPLE_SEED)
    texts = []
    for task in ("sum", "guess", "keydoor"):
        for _ in range(SAMPLE_CHATS):
            texts += [text for _, text in draw_chat(rng, task)]
    for tag in TAG_TOKENS:
        texts = [text.replace(tag, " ") for text in texts]
    return texts + ["You are a helpful assistant. Think step by step, then answer."] * 20


def train_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, the same at every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAG_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the tokenizer's files under the class name that transformers 4 and 5 both know."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
