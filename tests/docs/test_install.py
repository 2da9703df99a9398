"""The wheel of `make wheel`, installed with nothing but NumPy beside it, and the source distribution."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

import innet_drl as innet
from innet_drl import _core

pytestmark = pytest.mark.slow

PYTHON = ROOT / "python"
TOOLS = Path(sys.executable).parent
LICENSES = {"LICENSE", "LICENSES-THIRD-PARTY.txt"}


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel, which has the extension that all tests use."""
    found = list((ROOT / "dist").glob("innet_drl-*-manylinux*_x86_64.whl"))
    if not found:
        pytest.skip("there is no wheel in dist (make wheel), which `make test-all` makes on x86-64")
    (path,) = found
    with zipfile.ZipFile(path) as archive:
        same = archive.read("innet_drl/_core.abi3.so") == Path(_core.__file__).read_bytes()
    assert same, "the wheel in dist was made from another extension: make build wheel"
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment into which the wheel was installed."""
    environment = tmp_path_factory.mktemp("installed") / "environment"
    subprocess.run([TOOLS / "uv", "venv", "--quiet", "--python", sys.executable, environment], check=True)
    install: list[str | Path] = [TOOLS / "uv", "pip", "install", "--quiet", "--python", environment / "bin" / "python"]
    subprocess.run([*install, "--constraint", ROOT / "constraints.txt", wheel], check=True)
    return environment / "bin"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command where the package of this repository cannot be found."""
    folder = Path(command[0]).parent
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "INNET_TOKEN")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_everything_in_the_environment_is_pinned() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    at = f"{sys.prefix}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    names = {re.sub("[-_.]+", "-", each.name).lower() for each in importlib.metadata.distributions(path=[at])}
    assert len(names) > 50
    assert names - set(pinned) <= {"innet-drl", "pip", "setuptools"}


def program() -> str:
    """The program of the page on installing."""
    (text,) = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "docs" / "how-to" / "install.md").read_text())
    return str(text)


def test_the_wheel_runs_on_every_python_and_every_linux_since_2014(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    assert "manylinux2014_x86_64" in wheel.name
    shown = run(TOOLS / "auditwheel", "show", wheel.resolve())
    assert '"manylinux_2_17_x86_64"' in shown.stdout, shown.stdout + shown.stderr


def test_the_wheel_has_the_files_of_the_package_and_the_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    files = [path for path in PYTHON.rglob("*") if path.name == "py.typed" or path.suffix in (".py", ".pyi", ".html")]
    assert len(files) > 50
    expected = {str(path.relative_to(PYTHON)): path.read_bytes() for path in files}
    assert {name: packed.get(name) for name in expected} == expected, "the wheel is older than the sources: make wheel"
    information = f"innet_drl-{innet.__version__}.dist-info"
    others = packed.keys() - expected.keys()
    assert {name for name in others if not name.startswith(f"{information}/")} == {"innet_drl/_core.abi3.so"}
    assert {f"{information}/licenses/{name}" for name in LICENSES} <= others


def test_it_needs_numpy_alone_and_names_its_extras(installed: Path) -> None:
    code = (
        "import importlib.metadata as m\n"
        "print(*sorted(d.name for d in m.distributions()))\n"
        "print(*sorted(m.metadata('innet-drl').get_all('Provides-Extra')))\n"
        "print(*sorted(r.partition('>')[0] for r in m.requires('innet-drl') if 'extra' not in r))\n"
    )
    printed = run(installed / "python", "-c", code).stdout.splitlines()
    assert printed == [
        "innet-drl numpy",
        "bench data dev docs nvml ray redis sb3 tianshou torchrl train wandb",
        "numpy",
    ]


def test_the_program_of_the_page_samples_in_process_and_from_a_server(installed: Path) -> None:
    in_process = run(installed / "python", "-c", program())
    assert (in_process.returncode, in_process.stderr) == (0, "")
    serve: list[str | Path] = [installed / "innet-replay", "serve", "--listen", "innet://127.0.0.1:0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=installed) as server:
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert ready.startswith(f"innet-replay {innet.__version__} ready on "), ready
        remote = run(installed / "python", "-c", program(), ready.split()[-1])
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert (remote.returncode, remote.stderr) == (0, "")
    assert remote.stdout == in_process.stdout == f"innet-drl {innet.__version__} works: 32 of 100 items\n"


@pytest.mark.parametrize(
    "command",
    [
        "innet-drl --version",
        "innet-drl -V",
        "innet-drl train --version",
        "python -m innet_drl --version",
        "innet-replay --version",
        "innet-replay serve --version",
        "innet-replay stats -V",
        "innet-replay doctor --version",
    ],
)
def test_every_command_prints_the_release(installed: Path, command: str) -> None:
    name, *arguments = command.split()
    ended = run(installed / name, *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    program = "innet-replay" if name == "innet-replay" else "innet-drl"
    assert ended.stdout == f"{program} {innet.__version__}\n"


def test_the_release_has_one_source() -> None:
    """`Cargo.toml`, and the citation follows."""
    (source,) = re.findall(r'(?ms)^\[workspace\.package\]\nversion = "(.*?)"$', (ROOT / "Cargo.toml").read_text())
    (cited,) = re.findall(r"(?m)^version: (.*)$", (ROOT / "CITATION.cff").read_text())
    assert source == cited == innet.__version__ == importlib.metadata.version("innet-drl")


@pytest.mark.parametrize(
    "command", ["innet-drl --help", "innet-drl analyze --help", "innet-replay --help", "innet-replay serve --help"]
)
def test_help_needs_no_extra(installed: Path, command: str) -> None:
    name, *arguments = command.split()
    ended = run(installed / name, *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"usage: {name}" in ended.stdout.lower()


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "train --help",
        "evaluate runs/x",
        "record runs/x",
        "report runs/x",
        "analyze ratio",
        "analyze what-if --help",
    ],
)
def test_a_command_without_its_extra_is_one_line(installed: Path, command: str) -> None:
    ended = run(installed / "innet-drl", *command.split())
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(r"error: \w+ is not installed: pip install 'innet-drl\[train\]'\n", ended.stderr)


@pytest.mark.parametrize(
    "statement",
    ["import innet_drl.distributed", "from innet_drl.train import Config", "import innet_drl.torch_batches"],
)
def test_an_import_without_its_extra_names_it(installed: Path, statement: str) -> None:
    ended = run(installed / "python", "-c", statement)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"innet_drl\.errors\.MissingExtraError: \w+ is not installed: pip install 'innet-drl\[train\]'", last
    )


def test_every_crate_of_the_extension_is_in_the_file_of_licences() -> None:
    tree = ["cargo", "tree", "--locked", "--package", "replay_py", "--edges", "normal", "--prefix", "none"]
    listed = subprocess.run([*tree, "--format", "{p}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Crates of this workspace have a path.
    crates = {
        tuple(line.split()[:2]) for line in listed.splitlines() if line and "(/" not in line and "(proc" not in line
    }
    text = (ROOT / "LICENSES-THIRD-PARTY.txt").read_text()
    missing = {f"{name} {version[1:]}" for name, version in crates if f"{name} {version[1:]}" not in text}
    assert not missing, "make licenses"


@pytest.mark.timeout(300)
def test_the_source_distribution_has_what_a_build_needs(tmp_path: Path) -> None:
    made = run(TOOLS / "maturin", "sdist", "--manifest-path", ROOT / "crates/replay_py/Cargo.toml", "--out", tmp_path)
    assert made.returncode == 0, made.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("innet_drl-*/")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    found = [path for folder in ("crates", "verify") for path in ROOT.glob(f"{folder}/*/src/lib.rs")]
    crates = {str(path.relative_to(ROOT)) for path in found}
    package = {f"python/innet_drl/{name}" for name in ("__init__.py", "_core.pyi")}
    assert names >= {"Cargo.lock", "pyproject.toml", "README.md"} | LICENSES | crates | package
    assert not [name for name in names if name.endswith(".so")]
    metadata = ["cargo", "metadata", "--locked", "--offline", "--format-version", "1"]
    known = subprocess.run(metadata, cwd=folder, capture_output=True, text=True, check=False)
    assert known.returncode == 0, known.stderr
