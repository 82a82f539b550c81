import subprocess
import sys


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_without_mlx_the_import_says_in_one_sentence_where_mlx_runs():
    result = run("import sys; sys.modules['mlx'] = None; import mlxrl.algo")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: mlxrl.algo needs MLX, which runs on Apple silicon macOS and on Linux; "
        "install mlx there (mlxrl.env and mlxrl.memory work everywhere)"
    )


def test_only_mlx_and_the_standard_library_are_imported():
    code = (
        "import sys; before = set(sys.modules); import mlxrl.algo; "
        "roots = {name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names; "
        "print(sorted(root for root in roots if not root.startswith('_')))"
    )
    assert run(code).stdout.strip() == "['mlx', 'mlxrl']"
