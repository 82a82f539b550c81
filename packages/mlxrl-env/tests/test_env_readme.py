"""The README's code blocks run as they are printed."""

import asyncio
import re
from pathlib import Path

from mlxrl.env import as_step_result, make_env, reward_function, reward_names

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_the_environment_of_the_readme_is_won_by_the_right_moves(tmp_path):
    (tmp_path / "countdown.py").write_text(BLOCKS[0])
    suite = make_env(f"{tmp_path}/countdown.py:make", tasks=4)
    env = suite.make(suite.tasks("train")[1], 0, 0)  # task 1 starts at 3 + 1 = 4
    assert env.reset() == "4 left. Take 1, 2 or 3."
    first, second, third = (as_step_result(env.step(action)) for action in ("2", "two", "2"))
    # 4 - 2 = 2; "two" is no number and takes nothing; 2 - 2 = 0 wins
    assert (first.observation, first.reward, first.terminated) == ("2 left.", 0.0, False)
    assert (second.observation, second.info) == ("2 left.", {"invalid_action": True})
    assert env.state_id(first.observation) == env.state_id(second.observation) == "2"
    assert (third.reward, third.terminated) == (1.0, True)


def test_the_reward_of_the_readme_scores_a_batch(tmp_path):
    (tmp_path / "brevity.py").write_text(BLOCKS[1])
    score = reward_function(f"{tmp_path}/brevity.py:short_and_right")
    texts = ["It is 4.", "It is 5.", "After long thought I find that it is 4."]
    # short and right, wrong, right but 39 characters long
    assert score(["2+2?"] * 3, texts, None, None, answer=["4"] * 3) == [1.0, 0.0, 0.0]


def test_the_async_reward_of_the_readme_scores_a_batch(tmp_path):
    (tmp_path / "polite.py").write_text(BLOCKS[2])
    score = reward_function(f"{tmp_path}/polite.py:politeness", limit=8)
    right, long, nothing = asyncio.run(score(completions=["please", "yes, please", ""], answer=["x"] * 3))
    # 6 characters, 11 characters, none
    assert (right, long, str(nothing)) == (1.0, 0.0, "nothing to judge")


def test_every_reward_is_in_the_readme():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert [name for name in reward_names() if f"`{name}`" not in readme] == []
