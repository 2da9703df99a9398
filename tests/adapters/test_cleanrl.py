"""The changed lines of docs/how-to/cleanrl.md: in CleanRL's scripts, and on frames whose stacks are known."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from places import ROOT

PAGE = (ROOT / "docs" / "how-to" / "cleanrl.md").read_text()
SCRIPTS = ("dqn_atari.py", "rainbow_atari.py")
TARGET = "target_max, _ = target_network(data.next_observations).max(dim=1)"


def changes(script: str) -> list[tuple[str, str]]:
    """The removed and the added lines of each change of a script."""
    section = PAGE.split(f"## {script}", 1)[1]
    diff = re.search(r"```diff\n(.*?)```", section, re.DOTALL)
    assert diff is not None
    pairs = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff[1], re.MULTILINE)
    assert sum(len(part) for pair in pairs for part in pair) == len(diff[1]), "each change removes and adds lines"
    unmarked = [[re.sub(r"^.", "", part, flags=re.MULTILINE) for part in pair] for pair in pairs]
    return [(removed, added) for removed, added in unmarked]


def changed(script: str, text: str) -> str:
    """A script with the page's changes, each at one place."""
    for removed, added in changes(script):
        pattern = re.escape(removed).replace("…", r"[^)]*(?:\([^)]*\)[^)]*)*")
        text, found = re.subn(pattern, added.replace("\\", r"\\"), text)
        assert found == 1, f"{script} has {found} times:\n{removed}"
    return text


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_cleanrl_runs_with_the_changed_lines(script: str, tmp_path: Path) -> None:
    checkout, *packages = os.environ.get("CLEANRL_PATH", "").split(os.pathsep)
    if not checkout:
        pytest.skip("CLEANRL_PATH names no checkout of CleanRL, nor a folder of its packages")
    text = (Path(checkout) / "cleanrl" / script).read_text()
    (tmp_path / script).write_text(changed(script, text))
    flags = {"total-timesteps": 2_000, "learning-starts": 1_000, "buffer-size": 1_500, "batch-size": 8}
    command = [sys.executable, script, *(f"--{flag}={value}" for flag, value in flags.items())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([checkout, *packages])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    # Printed with the losses.
    assert "SPS" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_batches_are_those_of_cleanrl(script: str) -> None:
    """Stacks as of `FrameStack`, which starts an episode with four equal frames."""
    args = {"buffer_size": 1_000, "gamma": 0.9, "seed": 1, "num_envs": 1, "batch_size": 200, "n_step": 3}
    args |= {
        "total_timesteps": 10,
        "prioritized_replay_alpha": 0.5,
        "prioritized_replay_beta": 0.4,
        "prioritized_replay_eps": 1e-6,
    }
    names: dict[str, Any] = {
        "np": np,
        "device": torch.device("cpu"),
        "args": SimpleNamespace(**args),
        "global_step": 5,
        "torch": torch,
        "PrioritizedBatch": collections.namedtuple(
            "PrioritizedBatch", "observations actions rewards next_observations dones indices weights"
        ),
    }  # fmt: skip
    lines = {removed.split("\n")[0].strip(): added for removed, added in changes(script)}
    for place, added in lines.items():
        if not place.startswith(("rb.add", "data", "target_max", "rb.update", "writer.")):
            exec(_flush_left(added), names)
    n = 1 if script == "dqn_atari.py" else 3
    (append,) = (added for place, added in lines.items() if place.startswith("rb.add"))
    expected = {}
    number = 0
    for episode in range(4):
        number += 1
        stacks = [np.full((4, 84, 84), number, np.uint8)]
        for step in range(10):
            number += 1
            stacks.append(np.concatenate([stacks[-1][1:], np.full((1, 84, 84), number, np.uint8)]))
            names |= {"obs": stacks[-2][None], "real_next_obs": stacks[-1][None], "actions": np.array([step])}
            names["rewards"] = np.array([float(number)], np.float32)
            for end, parity in (("terminations", 0), ("truncations", 1)):
                names[end] = np.array([step == 9 and episode % 2 == parity])
            exec(_flush_left(append), names)
        for step in range(10):
            last = min(step + n, 10)
            first = int(stacks[step + 1][-1, 0, 0])
            reward = sum(0.9**i * (first + i) for i in range(last - step))
            discount = 0.0 if last == 10 and episode % 2 == 0 else 0.9 ** (last - step)
            expected[first - 1] = (stacks[step], step, reward, discount, stacks[last])
    total = names["rb"].stats()["tables"]["steps"]["total_mass"]
    exec(_flush_left(lines["data = rb.sample(args.batch_size)"]), names)
    batch = names["batch" if n == 3 else "data"]
    seen = set()
    for i in range(200):
        key = int(batch.observation[i, -1, 0, 0])
        observation, action, reward, discount, following = expected[key]
        np.testing.assert_array_equal(batch.observation[i], observation)
        assert int(batch.action[i]) == action
        np.testing.assert_allclose(batch.reward[i], reward, rtol=1e-6)
        np.testing.assert_allclose(batch.discount[i], discount, rtol=1e-6)
        np.testing.assert_array_equal(batch.next_observation[i], following)
        seen.add(key)
    assert len(seen) > 30
    # The lines of the loss and of the priorities.
    if n == 1:
        network = torch.nn.Linear(4 * 84 * 84, 10)
        names["q_network"] = names["target_network"] = lambda stacks: network(stacks.float().flatten(1) / 255)
        exec("with torch.no_grad():\n" + _flush_left(lines[TARGET]), names)
        names["loss"].backward()
        q = names["q_network"](batch.observation).gather(1, batch.action[:, None])[:, 0]
        after = names["q_network"](batch.next_observation).amax(1)
        error = batch.reward + batch.discount * after - q
        torch.testing.assert_close(names["loss"], (batch.weights * error**2).mean())
        assert network.weight.grad is not None
    else:
        names["new_priorities"] = np.linspace(2.0, 3.0, 200)
        exec(_flush_left(lines["rb.update_priorities(data.indices, new_priorities)"]), names)
        actions = names["data"].actions
        assert actions.shape == (200, 1)
        np.testing.assert_array_equal(names["data"].dones[:, 0], batch.discount == 0)
    assert names["rb"].stats()["tables"]["steps"]["total_mass"] != total


def _flush_left(lines: str) -> str:
    """Lines without their common indentation."""
    margin = min(len(line) - len(line.lstrip()) for line in lines.splitlines())
    return "".join(line[margin:] + "\n" for line in lines.splitlines())
