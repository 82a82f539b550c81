"""Environments whose every word is known, for tests."""

from mlxrl.env import StepResult


class Conversation:
    """Says its lines one after the other, whatever the answers; rewards 1, 2, 3, ..."""

    def __init__(self, *lines, max_turns=None, truncates=False):
        self.lines, self.truncates = lines, truncates
        self.max_turns = max_turns or len(lines)
        self.answers = []

    def reset(self):
        return self.lines[0]

    def step(self, action):
        self.answers.append(action)
        over = len(self.answers) == len(self.lines)
        return StepResult(
            "bye" if over else self.lines[len(self.answers)],
            reward=float(len(self.answers)),
            terminated=over and not self.truncates,
            truncated=over and self.truncates,
            info={"answers": len(self.answers)},
        )

    def state_id(self, observation):
        return f"saw {observation}"


def converse(task, seed, group_index):
    """The factory of conversations whose task is their lines."""
    return Conversation(*task)


class Chatter:
    """A few turns of different length, with the model's own words quoted back."""

    def __init__(self, max_turns, opening="Talk to me."):
        self.max_turns, self.opening = max_turns, opening

    def reset(self):
        self.turn = 0
        return self.opening

    def step(self, action):
        self.turn += 1
        return StepResult(f"{action[:3]}? " * self.turn, 0.0, terminated=self.turn == self.max_turns)

    def state_id(self, observation):
        return observation


def chatter(task, seed, group_index):
    """The factory of chatters whose task is their number of turns."""
    return Chatter(task)
