import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlxrl.algo import REDUCTIONS, algorithm_table, make_algorithm, reduction_weights, registry

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def registered(monkeypatch):
    """Let a test register algorithms that are forgotten afterwards."""
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))


def test_the_table_of_algorithms_is_the_one_the_code_writes():
    written = README.split("<!-- algorithms: algorithm_table() -->\n")[1].split("\n<!-- end -->")[0]
    assert written == algorithm_table()


def test_the_table_of_reductions_is_the_one_in_the_code():
    rows = "\n".join(f"| {name} | `{formula}` |" for name, formula in REDUCTIONS.items())
    assert f"| reduction | loss |\n|---|---|\n{rows}\n" in README


def test_the_loss_of_the_readme_runs_and_learns():
    scope: dict = {}
    exec(BLOCKS[0] + BLOCKS[1], scope)
    logp = mx.full((8, 2), -0.5)
    gradient = mx.grad(scope["loss_fn"])(logp, None, logp, mx.ones((8, 2)))
    # Successes (rows 0, 3 and 4) are pushed up, the others down; 16 tokens, A = 1 in group 1.
    assert [value < 0 for value in gradient[:, 0].tolist()] == [True, False, False, True, True, False, False, False]
    assert gradient[0, 0].item() == pytest.approx(-1 / 16, abs=1e-6)


def test_the_reader_s_own_algorithm_is_short_registered_checked_and_right(registered):
    example = BLOCKS[2]
    assert len(example.splitlines()) < 30
    # Dataclasses look their annotations up in the module, so the example runs in one.
    exec(example, {"__name__": "mlxrl_readme_example"})
    algorithm = make_algorithm("Quadratic", strength=0.5)
    mask = mx.ones((1, 1))

    def loss(x):
        return mx.sum(
            reduction_weights(algorithm.reduction, mask)
            * algorithm.token_loss(x, mx.zeros((1, 1)), None, mx.array([[2.0]]), mask)
        )

    value, gradient = mx.value_and_grad(loss)(mx.log(mx.array([[1.5]])))
    # -1.5 * 2 + 0.25 * 0.25 = -2.9375; d/d logp = 1.5 * (-2 + 0.5 * 0.5) = -2.625.
    assert value.item() == pytest.approx(-2.9375, abs=1e-5)
    assert gradient.item() == pytest.approx(-2.625, abs=1e-5)
    assert "| quadratic | `QuadraticAlgorithm` | `-rho A + (c/2) (rho-1)^2` | token_mean |" in algorithm_table()
    with pytest.raises(ValueError, match=r"quadratic: strength must be a finite number in \[0, inf\), got -1"):
        make_algorithm("quadratic", strength=-1)
