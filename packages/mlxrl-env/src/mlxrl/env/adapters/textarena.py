"""Games of TextArena for one player."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from mlxrl.env.adapters.libraries import cannot_be_had, load_library
from mlxrl.env.adapters.seeded import NumberedSuite, OwnChance
from mlxrl.env.names import unknown
from mlxrl.env.options import check_whole
from mlxrl.env.protocol import StepResult
from mlxrl.env.task import Message


def textarena_suite(
    env_id: str,
    *,
    seed: int = 0,
    size: int = 200,
    eval_size: int = 50,
    max_turns: int | None = None,
    **parameters: Any,
) -> NumberedSuite:
    """Play a game of TextArena for one player, rewarded when it is over.

    Args:
        env_id: a registered id, "GuessTheNumber-v0".
        seed: draws the seeds that games start from.
        size: number of training tasks.
        eval_size: number of evaluation tasks.
        max_turns: the most actions of an episode; by default the game's own limit, or 20 where it has none.
        parameters: of the game, `max_number = 10`.

    Raises:
        ValueError: there is no such game for one player, an option is out of range, or the package is not installed.
    """
    name = f"textarena:{env_id}"
    library = load_library("textarena", "textarena")
    if env_id not in load_library("textarena.envs.registration", "textarena").ENV_REGISTRY:
        raise unknown("game of TextArena", env_id, textarena_names())
    if max_turns is not None:
        check_whole("max_turns", max_turns, 1)

    def make(number: int, chance: int) -> TextArenaEnv:
        return TextArenaEnv(library, env_id, number, chance, max_turns, parameters)

    try:
        make(0, 0)
    except Exception as error:  # games for more players, and games without their word lists, raise when they start
        raise cannot_be_had(name, error) from error
    return NumberedSuite(name, make, size, eval_size, seed)


def textarena_names() -> Sequence[str]:
    """The ids of TextArena's games, those for more players among them, but not each in its three wrappings."""
    known: Mapping[str, Any] = load_library("textarena.envs.registration", "textarena").ENV_REGISTRY
    return [game for game in known if not game.endswith(("-raw", "-train"))]


class TextArenaEnv:
    """A game of TextArena, with chance of its own.

    An observation is what the game said since the last action, not all of it again. Brackets around an action may be
    left out where the game is registered so. The reward comes at the end: the game's own, often a share of the goal.

    Args:
        library: the module textarena.
        env_id: the game.
        number: the seed of the start.
        chance: with the number, draws what is left to chance later.
        max_turns: the most actions of an episode; None: the game's own limit, or 20.
        parameters: of the game.
    """

    def __init__(
        self, library: Any, env_id: str, number: int, chance: int, max_turns: int | None, parameters: dict[str, Any]
    ) -> None:
        self._number = number
        self._seed = chance
        self._chance = OwnChance(number)
        with self._chance.drawing():
            self._game = self._inner = library.make(env_id, **parameters)
        while isinstance(self._inner, library.Wrapper):  # whose observations repeat the whole game each turn
            self._inner = self._inner.env
        self._kinds = library.ObservationType
        self.reset()
        self.max_turns = max_turns or self._inner.state.max_turns or 20

    def reset(self) -> str:
        """Starts from the number; returns the rules and the first position."""
        with self._chance.drawing():
            self._game.reset(num_players=1, seed=self._number)
        self._chance = OwnChance(self._number, self._seed)
        self._said: tuple[str, ...] = ()
        self._board: str | None = None
        return self._news()

    def step(self, action: str) -> StepResult:
        """Plays a turn."""
        with self._chance.drawing():
            done = bool(self._game.step(action)[0])
        state = self._inner.state
        outcome = state.game_info[0]
        info = {"invalid_action": bool(getattr(state, "error_count", 0) or outcome.get("invalid_move"))}
        news = self._news()
        if not done:
            return StepResult(news, 0.0, terminated=False, info=info)
        reward = float(state.rewards[0]) if state.rewards else 0.0
        return StepResult(f"{news}\n{outcome.get('reason', '')}".strip(), reward, terminated=True, info=info)

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The board, or in games that show none all that was said and done since the start."""
        return self._said if self._board is None else self._board

    def _news(self) -> str:
        # Some games mix up the parts where they repeat an action; what is left of it is no text.
        messages = [message for message in self._inner.get_observation()[1] if isinstance(message[1], str)]
        self._said += tuple(text for _, text, _ in messages)
        boards = [text for _, text, kind in messages if kind == self._kinds.GAME_BOARD]
        self._board = boards[-1] if boards else self._board
        return "\n".join(text.strip() for _, text, kind in messages if kind != self._kinds.PLAYER_ACTION)
