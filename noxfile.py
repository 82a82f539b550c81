"""The front door of CI: `nox` runs every check that needs no GPU, `nox -l` lists the sessions.

Third-party packages come from uv.lock, hash-checked, through whatever index uv is set up to use.
"""

import difflib
import platform
import re
import shutil
import tempfile
import tomllib
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.version import Version

nox.needs_version = ">=2026.10.20"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "layers", "tests", "isolated", "lock_check"]
nox.options.parallel = "auto"  # one session a core; each session's output is printed when it ends
nox.options.allow_parallel = True

ROOT = Path(__file__).parent
PACKAGES = {path.name: path for path in sorted(ROOT.glob("packages/*"))}


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its formatting."""
    install(session, "--only-group=lint")
    session.run("ruff", "check", "--no-cache")
    session.run("ruff", "format", "--check", "--no-cache")


@nox.session
def types(session: nox.Session) -> None:
    """Types: strict for the sources of algo, env and memory, standard elsewhere."""
    install(session, "--all-packages", "--group=types")
    session.run("pyright")


@nox.session
def layers(session: nox.Session) -> None:
    """Imports go only downwards: the contracts of [tool.importlinter]."""
    install(session, "--only-group=layers")
    sources = ":".join(str(path / "src") for path in PACKAGES.values())
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})


@nox.session
def tests(session: nox.Session) -> None:
    """Every package's tests and the workspace's own, in one environment; arguments after `--` go to pytest."""
    install(session, "--all-packages", "--group=workspace")
    pytest(session, "not metal and not cuda")


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def isolated(session: nox.Session, package: str) -> None:
    """One package's wheel with what its metadata declares and no more, tested outside the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder)
        for name in sorted(needed(package)):
            session.run("uv", "build", "--wheel", "--quiet", "--out-dir", str(outside / "wheels"), str(PACKAGES[name]))
        wheels = sorted(str(path) for path in outside.glob("wheels/*.whl"))
        locked = str(export(session, "--all-packages", "--group=test", "--no-emit-workspace"))
        session.run("uv", "pip", "install", "--quiet", "--constraint", locked, "pytest", "hypothesis", *wheels)

        shutil.copy(ROOT / "pyproject.toml", outside)  # pytest's settings
        tests = shutil.ignore_patterns("src", "__pycache__")
        shutil.copytree(PACKAGES[package], outside / "packages" / package, ignore=tests)
        session.chdir(outside)
        pytest(session, "not metal and not cuda", "packages")


@nox.session
def metal(session: nox.Session) -> None:
    """The tests that need an Apple GPU."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Darwin arm64":
        session.skip(f"needs an Apple GPU, and this machine is {machine}")
    install(session, "--all-packages", "--group=workspace")
    test_on_gpu(session, "metal")


@nox.session
def cuda(session: nox.Session) -> None:
    """The tests that need an NVIDIA GPU, with MLX's CUDA backend in place of its CPU one."""
    if shutil.which("nvidia-smi") is None:
        session.skip("needs an NVIDIA GPU, and this machine has no nvidia-smi")
    locked = str(export(session, "--all-packages", "--group=workspace", "--no-emit-workspace"))
    excludes = Path(session.virtualenv.location, "excludes.txt")
    excludes.write_text("mlx-cpu\n")  # it ships the same files as the CUDA backend: both together work by chance
    members = [f"--editable={path}" for path in PACKAGES.values()]
    options = ("--quiet", "--constraint", locked, "--excludes", str(excludes))
    session.run_install("uv", "pip", "install", *options, "mlx[cuda13]", "pytest", "hypothesis", "hatchling", *members)
    test_on_gpu(session, "cuda")


@nox.session
def adapters(session: nox.Session) -> None:
    """The environments of other libraries, with every library installed: the adapters' tests and a run in each."""
    install(session, "--all-packages", "--all-extras", "--group=workspace")
    files = [
        *ROOT.glob("packages/*/tests/test_env_adapters*.py"),
        ROOT / "tests-integration/test_integration_adapters.py",
    ]
    pytest(session, "not metal and not cuda", *map(str, files))


@nox.session
def bench(session: nox.Session) -> None:
    """Race mlxrl's rollouts against other ways to sample and write the figures that the README quotes."""
    install(session, "--all-packages")
    session.run("python", "tests-integration/benchmarks.py")


@nox.session
def learning(session: nox.Session) -> None:
    """Train the embedded default from several seeds and write the figures that the README quotes."""
    install(session, "--all-packages")
    session.run("python", "tests-integration/learning.py", *session.posargs)


@nox.session
def multiturn(session: nox.Session) -> None:
    """Train the multi-turn examples from several seeds and write the figures that the README of mlxrl-cli quotes."""
    install(session, "--all-packages")
    session.run("python", "tests-integration/multiturn.py", *session.posargs)


@nox.session
def memory(session: nox.Session) -> None:
    """Measure memory beside its predictions and write the figures that DESIGN.md quotes."""
    install(session, "--all-packages")
    session.run("python", "tests-integration/memory.py", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Bring uv.lock up to date in its committed form; `-- --check` only compares."""
    relock(session, check="--check" in session.posargs)


@nox.session
def lock_check(session: nox.Session) -> None:
    """Compare uv.lock with what the projects' requirements lock to, and write nothing."""
    relock(session, check=True)


@nox.session
def bump(session: nox.Session) -> None:
    """Move the one version everywhere: `nox -s bump -- 0.2.0`."""
    if len(session.posargs) != 1:
        session.error("give the new version and nothing else: nox -s bump -- 0.2.0")
    version = str(Version(session.posargs[0]))
    for path in [ROOT, *PACKAGES.values()]:
        project = path / "pyproject.toml"
        text = re.sub(r'^version = ".*"$', f'version = "{version}"', project.read_text(), count=1, flags=re.MULTILINE)
        project.write_text(re.sub(r'"(mlxrl-[^"=]+)==[^"]+"', rf'"\1=={version}"', text))
    relock(session, check=False)


def install(session: nox.Session, *selection: str) -> None:
    """Make the session's environment exactly what uv.lock holds for the selection."""
    session.run_install("uv", "pip", "sync", "--quiet", str(export(session, *selection)))


def export(session: nox.Session, *selection: str) -> Path:
    """Write the selected part of uv.lock as requirements with hashes."""
    path = Path(session.virtualenv.location, "locked.txt")
    session.run_install("uv", "export", "--frozen", "--quiet", *selection, "--output-file", str(path))
    return path


def pytest(session: nox.Session, marks: str, *arguments: str) -> None:
    """Run the tests with these marks; Hypothesis takes the same examples every time and has no deadline to miss."""
    options = ("-p", "no:cacheprovider", "--durations=10", "--hypothesis-profile=ci", "-m", marks)
    # A uv that a test starts must not take the session's environment for its project's.
    clean = {"PYTHONPATH": None, "UV_PROJECT_ENVIRONMENT": None, "UV_PYTHON": None}
    session.run("pytest", *options, *session.posargs, *arguments, env=clean)


def test_on_gpu(session: nox.Session, mark: str) -> None:
    """Run the marked tests, which skip themselves without a GPU, only where MLX sees one."""
    session.run("python", "-c", "import mlx.core as mx; assert mx.is_available(mx.gpu), 'MLX sees no GPU'")
    pytest(session, mark)


def needed(package: str) -> set[str]:
    """The package and the members that its metadata leads to."""
    project = tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text())["project"]
    members = {Requirement(text).name for text in project["dependencies"]} & PACKAGES.keys()
    return {package}.union(*(needed(name) for name in members))


def relock(session: nox.Session, *, check: bool) -> None:
    """Resolve again with the locked versions as preferences; write the result, or compare it with uv.lock.

    The committed form names no index: every package comes from a flat folder "wheels", by file name and hash. A check
    passes over files that the index gained since for a locked version.
    """
    install(session, "--only-group=lock")
    path = ROOT / "uv.lock"
    old = new = scrubbed(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for project in [ROOT, *PACKAGES.values()]:
            copy = Path(folder, project.relative_to(ROOT))
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(project / "pyproject.toml", copy)
        before = ""
        while new != before:  # uv orders markers by the lock it starts from, so a changed lock settles a pass later
            before = new
            Path(folder, "uv.lock").write_text(before)
            session.run("uv", "lock", "--quiet", "--directory", folder)
            new = scrubbed(Path(folder, "uv.lock").read_text())
    if not check:
        path.write_text(new)
        return
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "uv.lock", "relocked", n=0, lineterm=""))
    changes = [line for line in diff[2:] if not line.startswith(("@@", "+    { path = "))]
    if changes:
        session.error("uv.lock is behind the projects' requirements; run `nox -s lock`:\n" + "\n".join(diff))


def scrubbed(text: str) -> str:
    """uv.lock without index URLs, sizes and upload times."""
    text = re.sub(r'registry = "https?://[^"]+"', 'registry = "wheels"', text)
    text = re.sub(r'url = "https?://[^"]*/([^"/]+)"', r'path = "\1"', text)
    return re.sub(r', (?:size = \d+|upload-time = "[^"]*")', "", text)
