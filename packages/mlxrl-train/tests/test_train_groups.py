"""Which groups a step samples, keeps and shapes, and how a sampler that is not the policy is corrected for."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrl.algo import Correction, make_algorithm
from mlxrl.rollout import Role
from mlxrl.train import DynamicSamplingError, Objective, batch_gradient, make_batch, make_config, open_session
from mlxrl.train import train as run
from mlxrl.train.rewards import charge_overlong
from mlxrl.train.scoring import score_trajectories
from mlxrl.train.step import train_step


@pytest.fixture
def answers(tmp_path):
    """A reward that differs within the groups of odd answers, and is constant within the others."""
    file = tmp_path / "answers.py"
    file.write_text(
        "def odd(answer, trajectories, **_):\n"
        "    return [float(int(a) % 2 * t.sample_index) for a, t in zip(answer, trajectories)]\n"
        "def none(answer, **_):\n"
        "    return [1.0 for _ in answer]\n"
    )
    return file


def session_of(values, answers, function="odd", **algorithm):
    rewards = [{"name": f"{answers}:{function}"}]
    return open_session(make_config(values(rewards=rewards, groups_per_step=4, algorithm=algorithm)))


def test_without_dynamic_sampling_every_group_is_kept_and_one_draw_is_made(values, answers):
    session = session_of(values, answers)
    metrics, groups, batch = train_step(session, 0)
    assert session.loader.position == 4
    assert len(groups.sampled) == len(groups.kept) == batch.size == 4 * 3
    assert metrics["groups_dropped"] == 0


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_dynamic_sampling_draws_again_for_what_it_dropped_until_the_batch_is_full(values, answers, name):
    session = session_of(values, answers, name=name, dynamic_sampling=True, max_draws=20)
    metrics, groups, batch = train_step(session, 0)
    kept = [int(t.task.columns["answer"]) for t in groups.kept]
    assert all(answer % 2 for answer in kept)
    assert batch.size == len(kept) == 4 * 3
    # each draw asks for the missing groups alone, so what was drawn is what was kept and what was dropped
    assert session.loader.position == 4 + metrics["groups_dropped"]
    assert len(groups.sampled) == 3 * session.loader.position
    assert metrics["groups_dropped"] > 0
    assert metrics["reward"] == pytest.approx(np.mean([t.reward for t in groups.sampled]))


def test_after_max_draws_the_step_trains_on_what_there_is(values, answers):
    session = session_of(values, answers, dynamic_sampling=True, max_draws=1)
    metrics, groups, batch = train_step(session, 0)
    assert session.loader.position == 4
    assert 0 < batch.size == len(groups.kept) < 12
    assert metrics["skipped"] == 0


def test_a_step_without_an_informative_group_is_skipped_even_with_a_kl_term(values, answers):
    fields = values(
        rewards=[{"name": f"{answers}:none"}], kl_beta=0.5, algorithm={"dynamic_sampling": True, "max_draws": 2}
    )
    session = open_session(make_config(fields))
    before = {name: np.array(value) for name, value in tree_flatten(session.model.trainable_parameters())}
    metrics, groups, batch = train_step(session, 0)
    assert batch is None
    assert groups.kept == []
    assert session.loader.position == 2 * 2  # two draws of groups_per_step
    assert (metrics["skipped"], metrics["grad_norm"], metrics["scored_rows"]) == (1, 0, 0)
    assert [metrics[f"forwards/{kind}"] for kind in ("old", "reference", "score")] == [0, 0, 0]
    for name, value in tree_flatten(session.model.trainable_parameters()):
        assert (np.array(value) == before[name]).all()


def test_after_max_skipped_steps_the_run_stops_with_an_error_and_a_checkpoint(values, answers, tmp_path):
    fields = values(
        rewards=[{"name": f"{answers}:none"}],
        steps=9,
        checkpoint={"every": 1},
        algorithm={"name": "dapo", "max_draws": 1, "max_skipped_steps": 3},
    )
    with pytest.raises(DynamicSamplingError, match="3 steps in a row"):
        run(make_config(fields))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "run" / "checkpoints" / "step-000003").is_dir()


def test_the_stop_leaves_a_checkpoint_of_its_step_whatever_checkpoint_every_says(values, answers, tmp_path):
    fields = values(
        rewards=[{"name": f"{answers}:none"}],
        steps=9,
        checkpoint={"every": 0},
        algorithm={"name": "dapo", "max_draws": 1, "max_skipped_steps": 2},
    )
    with pytest.raises(DynamicSamplingError):
        run(make_config(fields))
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


def test_groups_are_judged_before_shaping(values, answers):
    # lengths differ, and so does the penalty within every group; that must not make a constant group informative
    session = session_of(values, answers, "none", dynamic_sampling=True, max_draws=1, overlong_buffer=5)
    metrics, groups, _ = train_step(session, 0)
    penalties = {t.reward_parts["overlong"] for t in groups.sampled}
    assert len(penalties) > 1
    assert groups.kept == []
    assert metrics["rewards/overlong/mean"] == pytest.approx(np.mean([t.reward - 1 for t in groups.sampled]))


def test_the_overlong_penalty_grows_over_the_buffer_and_abstaining_rows_are_not_charged(episode):
    # at most 2 turns of 5 tokens, buffer 4: 0 up to 6, then -1/4 a token, -1 at 10 and beyond
    lengths = {1: 0.0, 6: 0.0, 7: -0.25, 9: -0.75, 10: -1.0, 12: -1.0}
    episodes = [replace(episode(0, (length,), reward=2.0, seed=length), max_turns=2) for length in lengths]
    charged = charge_overlong([*episodes, episode(0, (10,), reward=None)], max_action=5, buffer=4)
    assert [t.reward_parts["overlong"] for t in charged[:-1]] == list(lengths.values())
    assert [t.reward for t in charged[:-1]] == [2 + penalty for penalty in lengths.values()]
    assert charged[-1].reward is None
    assert "overlong" not in charged[-1].reward_parts


def test_each_episode_is_charged_by_its_own_limit_of_turns(episode):
    # a buffer of 8 tokens: of 5, 10 and 15 that may be sampled, so that penalties begin at 0, 2 and 7
    episodes = [replace(episode(0, (4,), reward=0.0, seed=turns), max_turns=turns) for turns in (1, 2, 3)]
    charged = charge_overlong(episodes, max_action=5, buffer=8)
    assert [t.reward for t in charged] == [-4 / 5, -2 / 8, 0.0]


def corrected(policy, batch, correction):
    gradient, metrics = batch_gradient(
        policy, batch, Objective(make_algorithm("grpo"), correction=correction), max_rows=2
    )
    return dict(tree_flatten(gradient)), metrics


@pytest.fixture
def off_policy_batch(policy, episode):
    episodes = [episode(0, (5, 2), reward=1.0), episode(0, (3,), reward=0.0, seed=1), episode(1, (4,), reward=2.0)]
    episodes.append(episode(1, (2,), reward=0.0, seed=1))
    options = {"rewards": [[e.reward] for e in episodes], "reward_weights": [1.0], "temperature": 0.7}
    return make_batch(policy, episodes, make_algorithm("grpo"), **options)


@pytest.mark.parametrize(
    "correction",
    [Correction("tis"), Correction("tis", "sequence", cap=1.5), Correction("mis", "geometric", band=(0, 50))],
    ids=["token", "sequence", "geometric"],
)
def test_a_correction_multiplies_the_loss_of_each_token_by_its_weight(policy, off_policy_batch, correction):
    # the same batch, its weights multiplied beforehand with the weights of the correction at the current policy
    scored = make_scores(policy, off_policy_batch)
    weights = correction(scored, off_policy_batch.view.sampler_logprobs, off_policy_batch.view.action_mask)
    assert not mx.allclose(weights, mx.ones_like(weights))
    expected, _ = corrected(policy, replace(off_policy_batch, weights=off_policy_batch.weights * weights), None)
    gradient, _ = corrected(policy, off_policy_batch, correction)
    for name, value in gradient.items():
        assert mx.allclose(value, expected[name], rtol=1e-4, atol=1e-6), name


def test_a_correction_changes_nothing_where_the_sampler_is_the_policy(policy, off_policy_batch):
    scored = make_scores(policy, off_policy_batch)
    view = replace(off_policy_batch.view, sampler_logprobs=scored)
    on_policy = replace(off_policy_batch, view=view)
    plain, _ = corrected(policy, on_policy, None)
    for correction in (Correction("tis"), Correction("mis", "sequence")):
        gradient, _ = corrected(policy, on_policy, correction)
        for name, value in gradient.items():
            assert mx.allclose(value, plain[name], rtol=1e-5, atol=1e-7), name


def make_scores(policy, batch):
    options = {"rows": range(batch.size), "temperature": 0.7, "pad_token_id": 0}
    return score_trajectories(policy, batch.segments, batch.view.roles, **options)[0]


def test_the_roles_of_rollouts_and_losses_are_the_same_numbers():
    import mlxrl.algo

    assert {role.name: role.value for role in Role} == {role.name: role.value for role in mlxrl.algo.Role}


def test_more_minibatches_than_kept_trajectories_take_one_step_for_each(values, answers):
    rewards = [{"name": f"{answers}:odd"}]
    fields = values(rewards=rewards, update={"minibatches": 6}, algorithm={"dynamic_sampling": True, "max_draws": 1})
    session = open_session(make_config(fields))
    kept = []
    for step in range(6):
        before = session.optimizer.step.item()
        metrics, groups, _ = train_step(session, step)
        kept.append(len(groups.kept))
        # every share is a step, but for those whose only trajectory has the mean reward
        shares = session.optimizer.step.item() - before + (metrics["skipped"] if kept[-1] else 0)
        assert shares == min(6, kept[-1])
    assert 3 in kept  # one group of three: fewer trajectories than minibatches


def test_an_action_that_is_cut_makes_its_episode_truncated_whatever_ends_it(rooms):
    fields = rooms(max_completion_len=2, group_size=16, algorithm={"mask_truncated": True})
    metrics, groups, batch = train_step(open_session(make_config(fields)), 0)
    end = 1  # the end-of-sequence token of the tiny models
    ends = [[t.segments[turn.segment].token_ids[turn.span[1] - 1] for turn in t.turns] for t in groups.sampled]
    cut = [any(token != end for token in tokens) for tokens in ends]
    assert any(cut)
    assert [t.truncated for t in groups.sampled] == cut
    assert metrics["completions/clipped_ratio"] == pytest.approx(np.mean(cut))
    trained = np.any(np.array(batch.weights) != 0, axis=1)
    assert not trained[np.array(cut)].any()  # what mask_truncated masks
