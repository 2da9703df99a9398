"""The files for Slurm and systemd, and on the page on production: well-formed, and run as plain processes here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trustme
from places import ROOT
from serving import until
from training import lines, newest

from innet_drl.train.observe.metrics import values_of
from innet_drl.train.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs/how-to/production.md").read_text()
FILES: dict[str, str] = dict(re.findall(r'(?ms)^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE))
FILES |= {path.name: path.read_text() for path in ROOT.glob("deploy/s*/*")}
SMALL = "--preset=cartpole --environments=4 --min-size=128 --capacity=4000 --batch-size=32 --layers=32 --hidden=32"
SMALL += " --epsilon-anneal-steps=0 --evaluation-games=3 --evaluation-period=0 --no-video --report-seconds=0.2"
SMALL += " --checkpoint-minutes=0.01"


def environment(folder: Path) -> dict[str, str]:
    """The commands of this interpreter's environment, and a home in the folder."""
    path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder)}


def free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def names(settings: str) -> set[str]:
    return set(re.findall(r"(?m)^(?:export )?(\w+)=", settings))


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".sbatch", ".env", ".sh"))])
def test_scripts_are_shell(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    subprocess.run(["bash", "-n", str(tmp_path / name)], check=True)


def test_the_scripts_for_slurm_train_and_continue_after_a_signal(tmp_path: Path) -> None:
    """Slurm's lines are comments of the shell, and its requeuing is the second start of the job."""
    settings = (
        f"RUN={tmp_path}/runs/cart\nFLAGS='{SMALL} '$(cat {tmp_path}/more)\nACTORS=2\nHOST=127.0.0.1\n"
        f"LISTEN=127.0.0.1\nPORT={free_port()}\nTOKEN_FILE={tmp_path}/token\n"
        f"export INNET_TOKEN=$(cat {tmp_path}/token)\n"
    )
    assert names(settings) == names(FILES["innet.env"])
    (tmp_path / "innet.env").write_text(settings)
    (tmp_path / "token").write_text("a token of the tests")
    (tmp_path / "more").write_text("--steps 1000000000")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/requeued\n')
    (tmp_path / "bin/scontrol").chmod(0o755)
    run = tmp_path / "runs/cart"
    with ExitStack() as stack:

        def batch(name: str, **variables: str) -> subprocess.Popen[bytes]:
            path = tmp_path / name
            path.write_text(FILES[name])
            output = stack.enter_context((tmp_path / f"{name}.log").open("ab"))
            job = subprocess.Popen(
                ["bash", str(path)],
                env=environment(tmp_path) | variables,
                cwd=tmp_path,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            stack.callback(end_group, job)
            return job

        actors = [batch("actors.sbatch", SLURM_ARRAY_TASK_ID=str(index)) for index in range(2)]
        evaluate = batch("evaluate.sbatch")
        learner = batch("learner.sbatch", SLURM_JOB_ID="17")

        until(lambda: values_of(newest(run), "actor_scores").keys() == {"0", "1"} or learner.poll() is not None)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait() == 0, (tmp_path / "learner.sbatch.log").read_text()
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"
        assert RunFolder(run).newest_checkpoint() is not None
        (tmp_path / "more").write_text("--steps 100")
        learner = batch("learner.sbatch", SLURM_JOB_ID="17")
        assert [job.wait() for job in (learner, *actors, evaluate)] == [0] * 4, [
            (tmp_path / f"{name}.sbatch.log").read_text() for name in ("learner", "actors", "evaluate")
        ]
    reports = [json.loads(line) for line in (tmp_path / "runs/cart.evaluations.jsonl").read_text().splitlines()]
    assert reports[-1]["runs"][0]["agent_steps"] == json.loads((run / "evaluation.json").read_text())["agent_steps"]


def end_group(job: subprocess.Popen[bytes]) -> None:
    """Ends a job with everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


UNITS = [name for name in FILES if name.endswith(".service")]


def test_the_units_are_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    for name in UNITS:
        # The commands are where this interpreter has them.
        text = FILES[name].replace("/opt/innet/bin", str(Path(sys.executable).parent))
        text = re.sub(r"(?m)^User=.*\n", "", text)
        (tmp_path / name).write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in UNITS if "@" not in name)]
    verify.append(f"{tmp_path}/innet-actor@3.service")
    done = subprocess.run(verify, capture_output=True, text=True)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "innet" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_commands_of_the_units_train(tmp_path: Path) -> None:
    """With TLS and a token for each role."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    for one in certificate.cert_chain_pems:
        one.write_to_path(str(tmp_path / "server.pem"), append=True)
    (tmp_path / "token").write_text("token of the operator")
    (tmp_path / "learner-token").write_text("token of the learners")
    (tmp_path / "actor-token").write_text("token of the actors")
    tokens = {
        "innet-learner.service": {"INNET_TOKEN": "token of the learners"},
        "innet-actor@.service": {"INNET_ACTOR_TOKEN": "token of the actors"},
    }
    port = free_port()
    settings = FILES["server.toml"].replace("/etc/innet", str(tmp_path)).replace("/var/lib/innet", str(tmp_path))
    settings = settings.replace("0.0.0.0:7710", f"127.0.0.1:{port}").replace("0.0.0.0:9710", "127.0.0.1:0")
    (tmp_path / "server.toml").write_text(settings)

    def command(name: str, index: int = 0) -> list[str]:
        (line,) = re.findall(r"(?m)^ExecStart=(.*)$", FILES[name])
        line = line.replace("/opt/innet/bin", str(Path(sys.executable).parent)).replace("/etc/innet", str(tmp_path))
        line = line.replace("replay.example:7710", f"127.0.0.1:{port}")
        line = line.replace("--preset breakout-paper --steps 50000000 --actors 16", f"{SMALL} --steps 800 --actors 2")
        return shlex.split(line.replace("%i", str(index)))

    with ExitStack() as stack:

        def start(name: str, index: int = 0) -> subprocess.Popen[bytes]:
            log = stack.enter_context((tmp_path / f"{name}{index}.log").open("wb"))
            process = subprocess.Popen(
                command(name, index),
                env=environment(tmp_path) | tokens.get(name, {}),
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(end_group, process)
            return process

        start("innet-replay.service")
        processes = [start("innet-actor@.service", index) for index in range(2)]
        processes.append(start("innet-learner.service"))
        assert [process.wait() for process in processes] == [0] * 3, [
            path.read_text() for path in tmp_path.glob("*.log")
        ]
    assert lines(tmp_path / "breakout")[-1]["agent_steps"] >= 800
