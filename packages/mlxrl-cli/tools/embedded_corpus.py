"""The text the embedded model is pretrained on: short chats about sums, a guessing game and a key-door walk.

Every draw comes from a `random.Random` that the caller seeds, so a seed fixes the corpus. The habits are uneven on
purpose: good ones are there but rare, and reinforcement learning has something to find.
"""

import random
import zlib

Chat = list[tuple[str, str]]  # (role, text) in speaking order

SYSTEM_TEXTS = ["You are a helpful assistant.", "Think step by step, then answer.", "Reply with an action."]
SYSTEM_SHARE = 0.12

# How the corpus answers a sum: the habit and its share.
SUM_HABITS = {
    "worked": 0.25,  # step by step inside <think>, then the right answer
    "slipped": 0.06,  # the same with one wrong step
    "by_eye": 0.48,  # an answer at once: a round number or one near the sum
    "untagged": 0.15,  # right, and without tags
    "unfinished": 0.06,  # worked, and no answer follows
}
# How the corpus plays a turn: the style and its share; and the share of turns whose action has no proper tags.
GUESS_STYLES = {"legal": 0.40, "heedless": 0.50, "expert": 0.10}
KEYDOOR_STYLES = {"legal": 0.45, "heedless": 0.35, "expert": 0.20}
GUESS_MALFORMED = 0.08
KEYDOOR_MALFORMED = 0.05
MIDDLE_SHARE = 0.3  # share of transcripts that begin at a later turn, so that an observation alone is a prompt too


def draw_sum(rng: random.Random) -> list[int]:
    """Three to five digits of 1 to 9."""
    count = rng.choice((3, 4, 5))
    return [rng.randint(1, 9) for _ in range(count)]


def is_held_out(digits: list[int]) -> bool:
    """Whether this exact order of digits is kept out of every training text: one in ten, by its checksum."""
    return zlib.crc32(("h" + "+".join(map(str, digits))).encode()) % 10 == 0


def draw_sum_of_kind(rng: random.Random, held_out: bool) -> list[int]:
    """The first drawn sum that is held out, or that is not."""
    while is_held_out(digits := draw_sum(rng)) != held_out:
        pass
    return digits


def sum_question(digits: list[int]) -> str:
    """The wording that training and evaluation ask; the corpus knows two more."""
    return f"What is {'+'.join(map(str, digits))}?"


def worked_steps(digits: list[int], slip_at: int | None = None, slip_by: int = 0) -> tuple[str, int]:
    """The running sum written out, and what it ends in; step `slip_at` is off by `slip_by`."""
    total, steps = digits[0], []
    for index, digit in enumerate(digits[1:]):
        result = total + digit
        if index == slip_at:
            result = max(1, result + slip_by)
        steps.append(f"{total}+{digit}={result}")
        total = result
    return f"<think>{' '.join(steps)}</think>", total


def sum_answer(rng: random.Random, digits: list[int]) -> str:
    """An answer to the sum by a habit drawn from `SUM_HABITS`."""
    total = sum(digits)
    habit = rng.choices(list(SUM_HABITS), SUM_HABITS.values())[0]
    if habit == "by_eye":
        if rng.random() < 0.55:
            return f"<answer>{max(5, 5 * round(total / 5))}</answer>"
        return f"<answer>{max(1, total + rng.choice([-3, -2, -1, 0, 0, 1, 2, 3]))}</answer>"
    if habit == "untagged":
        return f"The answer is {total}." if rng.random() < 0.5 else str(total)
    if habit == "unfinished":
        return worked_steps(digits)[0]
    if habit == "slipped":
        steps, result = worked_steps(digits, rng.randrange(len(digits) - 1), rng.choice([-10, -2, -1, 1, 2, 10]))
    else:
        steps, result = worked_steps(digits)
    return f"{steps}<answer>{result}</answer>"


def sum_chat(rng: random.Random) -> Chat:
    """One question and one answer, never about a held-out sum."""
    digits = draw_sum_of_kind(rng, held_out=False)
    wording = rng.random()
    if wording < 0.12:
        question = f"Compute {'+'.join(map(str, digits))}."
    elif wording < 0.20:
        question = f"{'+'.join(map(str, digits))}=?"
    else:
        question = sum_question(digits)
    return [("user", question), ("assistant", sum_answer(rng, digits))]


class GuessGame:
    """A secret of 1 to 15 in four guesses; the answer to a guess names the range that is left."""

    def __init__(self, rng: random.Random):
        self.secret = rng.randint(1, 15)
        self.low, self.high = 1, 15
        self.turns_left, self.won = 4, False
        self.observation = f"Start: {self.low}-{self.high}"

    def legal_actions(self) -> list[str]:
        return [str(guess) for guess in range(self.low, self.high + 1)]

    def expert_action(self) -> str:
        return str((self.low + self.high) // 2)

    def heedless_action(self, rng: random.Random) -> str:
        return str(rng.randint(1, 15))

    def malformed(self, rng: random.Random, action: str) -> str:
        return rng.choice([action, f"I guess {action}.", f"<action>{action}"])

    def step(self, action: str | None) -> None:
        """One guess; None is a turn without a proper action."""
        self.turns_left -= 1
        hint = "Invalid"
        if action is not None:
            guess = int(action)
            self.won = guess == self.secret
            if guess < self.secret:
                hint, self.low = "Higher", max(self.low, guess + 1)
            else:
                hint, self.high = "Lower", min(self.high, guess - 1)
        self.observation = f"{hint}: {self.low}-{self.high}"


class KeyDoorGame:
    """Four rooms in a row: walk to the key, take it, walk to the door, open it."""

    def __init__(self, rng: random.Random, max_turns: int = 8):
        self.room, self.key, self.door = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4)
        self.held, self.turns_left, self.won = False, max_turns, False

    @property
    def observation(self) -> str:
        return f"Room {self.room} key {'held' if self.held else self.key} door {self.door}"

    def legal_actions(self) -> list[str]:
        possible = {
            "left": self.room > 1,
            "right": self.room < 4,
            "take": self.room == self.key and not self.held,
            "open": self.room == self.door and self.held,
        }
        return [action for action, legal in possible.items() if legal]

    def expert_action(self) -> str:
        goal = self.door if self.held else self.key
        if self.room == goal:
            return "open" if self.held else "take"
        return "right" if goal > self.room else "left"

    def heedless_action(self, rng: random.Random) -> str:
        return rng.choices(["right", "left", "take", "open"], [0.55, 0.15, 0.15, 0.15])[0]

    def malformed(self, rng: random.Random, action: str) -> str:
        return rng.choice([action, f"I go {action}.", f"<action>{action}"])

    def step(self, action: str | None) -> None:
        """One move; None, or a move that is not possible here, only costs the turn."""
        self.turns_left -= 1
        if action not in self.legal_actions():
            return
        if action in ("left", "right"):
            self.room += 1 if action == "right" else -1
        elif action == "take":
            self.held = True
        else:
            self.won = True


def play(rng: random.Random, game: GuessGame | KeyDoorGame, styles: dict[str, float], malformed: float) -> Chat:
    """The transcript of one game, each turn in a style drawn from `styles`, `malformed` of the actions untagged."""
    chat: Chat = []
    while game.turns_left and not game.won:
        style = rng.choices(list(styles), styles.values())[0]
        if style == "legal":
            action = rng.choice(game.legal_actions())
        elif style == "heedless":
            action = game.heedless_action(rng)
        else:
            action = game.expert_action()
        well_formed = rng.random() >= malformed
        text = f"<action>{action}</action>" if well_formed else game.malformed(rng, action)
        chat += [("user", game.observation), ("assistant", text)]
        game.step(action if well_formed else None)
    if rng.random() < MIDDLE_SHARE:
        chat = chat[2 * rng.randrange(len(chat) // 2) :]
    return chat


def draw_chat(rng: random.Random, task: str) -> Chat:
    """One chat of the task `sum`, `guess` or `keydoor`, some with a system message."""
    system = [("system", rng.choice(SYSTEM_TEXTS))] if rng.random() < SYSTEM_SHARE else []
    if task == "sum":
        return system + sum_chat(rng)
    if task == "guess":
        return system + play(rng, GuessGame(rng), GUESS_STYLES, GUESS_MALFORMED)
    return system + play(rng, KeyDoorGame(rng), KEYDOOR_STYLES, KEYDOOR_MALFORMED)
