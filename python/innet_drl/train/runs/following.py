"""Evaluations of a run's checkpoints in a separate process, which follows the run's folder (`evaluate --follow`)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.display import Progress, silent
from innet_drl.train.play.evaluation_report import Report, evaluate_runs
from innet_drl.train.run_folder import FINISHED, RunFolder
from innet_drl.train.runs.evaluation_schedule import EvaluatedAgent, save_if_best

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


def follow(
    runs: Sequence[Path],
    *,
    namespace: str | None = None,
    best: bool = False,
    protocol: str | None = None,
    seeds: Sequence[int] = (0,),
    changes: Mapping[str, Any] = MappingProxyType({}),
    progress: Progress = silent,
) -> Iterator[Report]:
    """Evaluates each new checkpoint of a run until training has ended.

    The run keeps the agent with the best evaluation, if it was played under the run's own conditions. The folder need
    not exist yet. The run must have the `namespace`; other arguments are as in `evaluate_runs`.
    """
    if len(runs) != 1 or best:
        raise ConfigurationError("--follow evaluates the new checkpoints of one run: name one folder, without --best")
    folder = RunFolder(runs[0])
    evaluated: Path | None = None
    waited = False
    while True:
        ended_at = _ended_at(folder)
        newest = folder.newest_checkpoint()
        if newest is not None and newest != evaluated:
            own = folder.config().namespace
            if namespace not in (None, own):
                raise ConfigurationError(
                    f"--namespace {namespace}: the run of {folder.path} has "
                    + (f"the namespace {own}" if own else "no namespace")
                )
            report = evaluate_runs(runs, protocol=protocol, seeds=seeds, changes=changes, progress=progress)
            (agent,), (evaluation,) = report.agents, report.evaluations
            evaluated = agent.checkpoint
            if report.config == agent.config.evaluated and len(seeds) == 1:
                tensors = dict(agent.network.state_dict())
                save_if_best(folder, EvaluatedAgent(tensors, agent.agent_steps, agent.learner_updates), evaluation)
            yield report
            continue
        if newest is not None and ended_at is not None and int(newest.stem) <= ended_at:
            return
        if newest is None and not waited:
            logger.info("waiting for the first checkpoint of %s", folder.path)
            waited = True
        time.sleep(POLL_SECONDS)


def _ended_at(folder: RunFolder) -> int | None:
    """Agent steps at which training has reached its end; `None` if it has not."""
    try:
        *_, last = (folder.path / "sessions.jsonl").read_text().splitlines()
        session = json.loads(last)
        # A session that continues the run begins with a line of its own.
        return int(session["agent_steps"]) if session.get("how") == FINISHED else None
    except (FileNotFoundError, ValueError, KeyError):
        return None
