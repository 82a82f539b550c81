"""Code against tests: right and wrong answers, and code that would take the machine down."""

import os
from pathlib import Path

import pytest

from mlxrl.env import CodeTestsReward, reward_function
from mlxrl.env.code_blocks import last_block

pytestmark = pytest.mark.skipif(os.name != "posix", reason="code-tests needs the limits of Linux or macOS")

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(2, 3) == 5\nassert add('a', 'b') == 'ab'"


@pytest.fixture(scope="module")
def passes():
    function = CodeTestsReward(seconds=20.0)

    def score(code, tests=TESTS):
        (reward,) = function(["?"], [code], tests=[tests])
        return reward

    return score


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        (ADD, 1.0),
        (f"Like this:\n```python\n{ADD}```\nThat is all.", 1.0),
        (f"```python\ndef add(a, b):\n    return 0\n```\nNo:\n```py\n{ADD}```", 1.0),
        ("def add(a, b):\n    return a - b\n", 0.0),
        ("raise ValueError('no')", 0.0),
        ("I would add the two.", 0.0),
        ("", 0.0),
        (f"{ADD}\nif __name__ == '__main__':\n    raise SystemExit(1)", 1.0),
        (f"from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\n{ADD}", 1.0),
    ],
)
def test_code_earns_its_reward_by_passing_the_tests(passes, code, reward):
    assert passes(code) == reward


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'ready ' * 100000)\n    except OSError:\n"
        "        pass\nos._exit(0)",
        "print('ready 0123456789abcdef')",
    ],
)
def test_code_that_leaves_before_its_tests_has_not_passed_them(passes, code):
    assert passes(code) == 0.0


def test_tests_are_a_text_or_a_list_and_a_row_without_any_is_not_scored():
    tests = [["assert x == 1", "assert x < 2"], ["assert x == 1", "assert x > 2"], None, "", [], [None]]
    rewards = CodeTestsReward()(["?"] * 6, ["x = 1"] * 6, tests=tests)
    assert rewards == [1.0, 0.0, None, None, None, None]


def test_tests_that_are_no_text_fail_their_row_alone():
    broken, right = CodeTestsReward()(["?"] * 2, ["x = 1"] * 2, tests=[3, "assert x"])
    assert (str(broken), right) == ("tests must be text or a list of texts, got int 3", 1.0)
    assert isinstance(broken, Exception)


def test_code_and_tests_without_end_end_and_the_other_rows_are_scored():
    codes = ["while True:\n    pass", "import time\ntime.sleep(3600)", "7 ** 10 ** 9", ADD, ADD]
    tests = [*[TESTS] * 4, "while True: pass"]
    assert CodeTestsReward(seconds=5.0, workers=5)(["?"] * 5, codes, tests=tests) == [0.0, 0.0, 0.0, 1.0, 0.0]


FORKS = """
import os, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(3600)
        children += 1
except OSError:
    pass
"""


def test_a_fork_bomb_has_no_child(passes):
    assert passes(FORKS, "assert children == 0") == 1.0


def test_no_thread_or_command_can_be_started(passes):
    assert passes("import threading\nthreading.Thread(target=print).start()", "pass") == 0.0
    assert passes("import subprocess\nsubprocess.run(['true'])", "pass") == 0.0


@pytest.mark.skipif("sys.platform == 'darwin'", reason="macOS does not limit a process's memory")
def test_a_memory_hog_is_refused_its_memory(passes):
    hog = "try:\n    x = bytearray(3 * 2**30)\nexcept MemoryError:\n    x = None"
    assert passes(hog, "assert x is None") == 1.0
    assert passes("x = []\nwhile True:\n    x.append(bytearray(2**24))") == 0.0


def test_output_without_end_goes_nowhere(passes):
    assert (
        passes(f"import sys\nfor _ in range(1000):\n    print('x' * 10**5)\n    sys.stderr.write('x' * 10**5)\n{ADD}")
        == 1.0
    )


def test_files_are_small_and_stay_in_a_folder_that_goes_away(passes, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert passes("open('small', 'w').write('x')\nimport os", "assert os.listdir('.') == ['small']") == 1.0
    big = "try:\n    open('big', 'wb').write(bytes(20 * 2**20))\n    raised = False\nexcept OSError:\n    raised = True"
    assert passes(big, "assert raised") == 1.0
    many = "files = []\ntry:\n    while len(files) < 1000:\n        files.append(open(str(len(files)), 'w'))\n"
    assert passes(f"{many}except OSError:\n    pass", "assert len(files) < 64") == 1.0
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_the_environment_and_of_the_input_is_seen(passes, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "abc")
    assert passes("import os, sys", "assert 'SECRET_KEY' not in os.environ and sys.stdin.read() == ''") == 1.0


def test_limits_cannot_be_lifted_again(passes):
    lift = "import resource\ntry:\n    resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))\n    lifted = True\n"
    assert passes(f"{lift}except (OSError, ValueError):\n    lifted = False", "assert not lifted") == 1.0


def children():
    """The ids of this process's children."""
    stats = {path.parent.name: path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()}
    return {pid for pid, stat in stats.items() if int(stat.rpartition(")")[2].split()[1]) == os.getpid()}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_no_process_is_left_behind():
    # code that closes what it would answer by, and goes on
    deaf = "import os\nos.closerange(0, 64)\nwhile True: pass"
    before = children()
    assert CodeTestsReward(seconds=60.0)(["?"], [deaf], tests=["pass"]) == [0.0]
    assert children() == before


def test_options_out_of_range_are_refused():
    for options, message in (
        ({"seconds": 0}, "seconds must be above 0, got 0"),
        ({"memory_mb": 5}, "memory_mb must be a whole number of at least 64, got 5"),
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            reward_function("code-tests", **options)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("```a\n1\n```\n```b\n2\n```", "2\n"),
        ("```python\nx = 1", "```python\nx = 1"),  # never closed: no block
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("use ```x``` here", "use ```x``` here"),
        ("```python\n```", ""),
    ],
)
def test_the_last_block_between_fences_is_the_code(text, block):
    assert last_block(text) == block
