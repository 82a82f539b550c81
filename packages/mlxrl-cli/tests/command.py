"""The command in this process, and a run of it that is short."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from mlxrl.cli import main

TINY = ["--set", "groups_per_step=2", "--group-size", "4", "--max-tokens", "16", "--set", "eval.tasks=4"]
PROGRAM = "import sys; sys.argv[0] = 'mlxrl-cli'; from mlxrl.cli import main; main()"


def cli(*arguments, folder, expect=0):
    """What the command printed: on standard output when it should succeed, on standard error otherwise."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(sys, "argv", ["mlxrl-cli", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
    assert (stopped.value.code or 0) == expect, f"{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue() if expect == 0 else err.getvalue()


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
