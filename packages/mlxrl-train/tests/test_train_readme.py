"""The README's example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_readme_trains_and_goes_on(tmp_path, monkeypatch, capsys):
    example, reward = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "brevity.py").write_text(reward)
    names = {}
    exec(compile(example, str(README), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["step 1", "step 2"]
    # up to 8 characters earn 0 to 0.5 by their brevity alone
    assert all(0 <= row["reward"] <= 0.5 for row in names["result"].metrics)
    assert [row["step"] for row in names["longer"].metrics] == [3]
    assert (tmp_path / "runs" / "first" / "adapters" / "adapters.safetensors").is_file()
