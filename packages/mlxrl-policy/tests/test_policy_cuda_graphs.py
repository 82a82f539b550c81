import os
import subprocess
import sys

import pytest

NAMES = ("MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_ENABLE_CACHE_THRASHING_CHECK")
PRINT = f"import os, mlxrl.policy; print(*(os.environ[name] for name in {NAMES}))"


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "2000 0"), ({NAMES[0]: "77"}, "77 0"), ({NAMES[1]: "1"}, "2000 1")]
)
def test_the_cache_of_cuda_graphs_has_room_unless_its_size_is_given(given, expected):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    result = subprocess.run([sys.executable, "-c", PRINT], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
