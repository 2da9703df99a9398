"""Writes the steps of a Gymnasium environment.

Gymnasium returns the last observation of an episode in three ways: a single environment returns it with the step that
ends the episode; a vector environment does so in `info` (SAME_STEP), or with the next step (NEXT_STEP). The recorder
writes it as `Writer.append` needs it, so that truncated episodes bootstrap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from innet_drl._core import Writer
from innet_drl.errors import ConfigError, ReplayError
from innet_drl.structures import at_index, map_leaves, named_parts

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["Recorder"]

_Results = tuple[Any, Any, Any, Any, dict[str, Any]]
"""Results of `step` of a Gymnasium environment."""


class Recorder:
    """Wraps an environment and appends its steps to a writer; other attributes are the environment's.

    The table has the columns of `Table.from_spaces`, and possibly more. Observations and actions may be dictionaries or
    tuples of arrays, also nested, as the environment's spaces are. Use the recorder as a context manager, which
    ends as a `Writer` does, or call `close`, which sends the remaining steps. Gymnasium itself is not imported.

    Args:
        env: A Gymnasium environment, or a vector environment that resets by itself (NEXT_STEP or SAME_STEP).
        writer: Writer for as many environments: 1, or `env.num_envs`.
        q_function: Maps observations `(num_envs, *shape)`, or a structure of them, to Q-values `(num_envs, actions)`.
            It is called for the last observations of truncated episodes that are not acted on, if `step` is given
            Q-values.

    Raises:
        ConfigError: No writer, no environment of Gymnasium, a vector environment that does not reset by itself, a
            writer for another number of environments, or one whose view is a `Window`, unless the environment's mode is
            NEXT_STEP.
    """

    def __init__(self, env: Any, writer: Writer, q_function: Callable[[NDArray[Any]], ArrayLike] | None = None) -> None:
        if not isinstance(writer, Writer):
            raise ConfigError(
                f"Recorder(env, writer) takes a Writer, such as replay.writer(table, num_envs), and got {writer!r}"
            )
        if hasattr(env, "possible_agents"):
            raise ConfigError(
                f"Recorder records environments of one agent, as Gymnasium's, and {env!r} has several: open "
                "replay.writer(table, num_envs=len(env.possible_agents)), and append a row of each agent"
            )
        self._env, self._writer, self._q_function = env, writer, q_function
        self._vector = hasattr(env, "num_envs")
        action_space: Any = getattr(env, "single_action_space" if self._vector else "action_space", None)
        if not hasattr(action_space, "dtype"):
            raise ConfigError(
                f"Recorder(env, writer) takes an environment of Gymnasium, and got {env!r}: convert it, or append its "
                "steps with Writer.append"
            )
        self._streams = env.num_envs if self._vector else 1
        # Members of Gymnasium's `AutoresetMode`, which is not imported.
        mode = getattr(getattr(env, "metadata", {}).get("autoreset_mode"), "name", None) if self._vector else "SINGLE"
        if mode not in ("SINGLE", "NEXT_STEP", "SAME_STEP"):
            raise ConfigError(
                f"the vector environment has the autoreset_mode {mode}: make it with NEXT_STEP or SAME_STEP, so that "
                "its episodes restart by themselves"
            )
        if writer.num_envs != self._streams:
            raise ConfigError(
                f"the writer is for {writer.num_envs} environments, and the recorder has {self._streams}: open it with "
                f"num_envs={self._streams}"
            )
        self._next_step = mode == "NEXT_STEP"
        if not self._next_step and writer._final_observation != "final_observation":
            raise ConfigError(
                "the view of the writer has no place for the last observation of an episode: use NStep, Sequences or "
                "Trajectory of the column 'observation', or a vector environment of the mode NEXT_STEP, which returns "
                "it as a step"
            )
        self._action_dtype = action_space.dtype
        parts = writer._parts
        self._observation_parts, self._action_parts = parts.get("observation"), parts.get("action")
        self._observation: Any = None
        self._first = np.ones(self._streams, bool)
        self._final = np.zeros(self._streams, bool)
        # Row and results of a step that is not appended yet.
        self._pending: tuple[dict[str, Any], _Results] | None = None

    def reset(self, *, options: dict[str, Any] | None = None, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the environment; an unfinished episode is cut off, and its incomplete windows are dropped.

        Args:
            options: For the environment. With a `reset_mask`, bool `(num_envs,)`, a vector environment resets the
                environments of the mask alone, and the episodes of the others go on. In the mode NEXT_STEP, reset an
                episode that was truncated in the last step only after the next one, which has its last observation.
            **arguments: For the environment, such as `seed`.

        Raises:
            ConfigError: A `reset_mask` for another number of environments, or one that leaves out environments after
                their step was lost.
            ReplayError: As in `step`, for a step that is still not appended; the environment was not reset.
        """
        self._append_pending(60.0)
        mask = self._reset_mask(options)
        if options is not None:
            arguments["options"] = options
        self._observation = None
        observation, info = self._returned("observation, info", self._env.reset(**arguments))
        self._observation = self._kept(observation)
        self._first, self._final = self._first | mask, self._final & ~mask
        return observation, info

    def _reset_mask(self, options: dict[str, Any] | None) -> NDArray[np.bool_]:
        """A copy of the mask, because Gymnasium's environments remove it from the options."""
        if not self._vector or options is None or options.get("reset_mask") is None:
            return np.ones(self._streams, bool)
        mask = np.array(options["reset_mask"])
        if mask.dtype != np.bool_ or mask.shape != (self._streams,):
            raise ConfigError(
                f"reset_mask has to be an array of bool[{self._streams}], one for each environment, and is "
                f"{mask.dtype}{list(mask.shape)}"
            )
        if self._observation is None and not mask.all():
            raise ConfigError(
                "no episode has begun, or the last step failed, so no environment can go on: call `reset` without "
                "a `reset_mask`"
            )
        return mask

    def step(
        self,
        action: Any,
        *,
        q: ArrayLike | None = None,
        priority: ArrayLike | None = None,
        timeout: float | None = 60.0,
        **columns: ArrayLike,
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes one step and appends it.

        After an error of the writer, such as `DeadlineError`, call `step` again: the environment has already stepped,
        so the call only appends that step and returns its results. It ignores arguments other than the timeout.

        Args:
            action: For the environment: one action, or one of each environment.
            q: float32 `(num_envs, actions)`: Q-values of the current observation, for initial priorities.
            priority: As in `Writer.append`.
            timeout: As in `Writer.append`.
            **columns: More columns of the table, with a leading dimension of `num_envs`, and `version` as in
                `Writer.append`.

        Raises:
            ConfigError: The environment was not reset, also after it has raised an exception, a truncated episode needs
                a `q_function`, or a vector environment ended an episode without its last observation.
            ReplayError: As in `Writer.append`. After a `ValueError`, for example an array of another shape or an
                observation with NaN, the step is lost: call `reset`.
        """
        if self._pending is None:
            if self._observation is None:
                raise ConfigError(
                    "the episode is over, none has begun, or the last step failed: call `reset` before `step`"
                )
            self._take(action, q, priority, columns)
        return self._append(timeout)

    def _take(self, action: Any, q: Any, priority: Any, columns: dict[str, Any]) -> None:
        """Steps the environment, and makes the row of the step."""
        # A copy: the environment may clip the action in place.
        taken = self._mapped(self._action_parts, action, lambda part: self._rows(np.array(part, self._action_dtype)))
        # None until the results are there: after an exception the environment may have stepped.
        observation, self._observation = self._observation, None
        results = self._returned("observation, reward, terminated, truncated, info", self._env.step(action))
        following, reward, terminated, truncated, info = results
        ended = np.reshape(np.logical_or(terminated, truncated), self._streams)
        row: dict[str, Any] = {
            "observation": observation,
            "action": taken,
            "reward": np.reshape(np.asarray(reward, np.float32), self._streams),
            "terminated": np.reshape(terminated, self._streams),
            "truncated": np.reshape(truncated, self._streams),
            "first": self._first,
            "q": q,
            "priority": priority,
            **columns,
        }
        if self._next_step:
            row["final"] = self._final
        elif ended.any():
            row |= self._last_observations(following, info, ended, row["truncated"], q)
        self._pending = row, results
        if self._next_step:
            # The row after an end has the episode's last observation, and the next row starts a new episode.
            self._first, self._final = self._final, ended
        else:
            self._first = ended
        if self._vector or not ended.any():
            self._observation = self._kept(following)

    def _returned(self, names: str, results: Any) -> Any:
        """Checks and returns the tuple of `reset` or `step`, whose parts are `names`."""
        parts = names.split(", ")
        if not isinstance(results, tuple) or len(results) != len(parts):
            call = "reset" if len(parts) == 2 else "step"
            number = len(results) if isinstance(results, tuple) else 1
            raise ConfigError(
                f"{call} of the environment has to return ({names}), as Gymnasium's environments do, and returned "
                f"{number} value{'s' * (number > 1)}"
            )
        return results

    def _append(self, timeout: float | None) -> _Results:
        """Appends the pending row, and returns the results of its step."""
        assert self._pending is not None
        row, results = self._pending
        try:
            self._writer.append(**row, timeout=timeout)
        except Exception as error:
            if isinstance(error, ValueError) or not isinstance(error, ReplayError):
                # The writer would refuse the row again.
                self._pending = self._observation = None
            raise
        self._pending = None
        return results

    def _append_pending(self, timeout: float | None = 60.0) -> None:
        if self._pending is not None:
            self._append(timeout)

    def _last_observations(
        self, following: Any, info: dict[str, Any], ended: NDArray[np.bool_], truncated: NDArray[np.bool_], q: Any
    ) -> dict[str, Any]:
        last = self._kept(following)
        if self._vector:
            if "final_obs" not in info:
                raise ConfigError(
                    "an episode ended in the mode SAME_STEP without info['final_obs']: return the last observations "
                    "there, or use the mode NEXT_STEP"
                )
            final = info["final_obs"]
            if not isinstance(last, tuple) and isinstance(final, tuple):
                # One observation for each environment, and not a part of the observation.
                final = list(final)
            for index in np.flatnonzero(ended):
                map_leaves(partial(_put, int(index)), last, at_index(final, int(index)))
        row: dict[str, Any] = {"final_observation": last, "final": ended}
        if q is not None:
            final_q = np.zeros_like(np.asarray(q), np.float32)
            if truncated.any():
                if self._q_function is None:
                    raise ConfigError(
                        "a truncated episode bootstraps from the Q-values of its last observation: give the Recorder a "
                        "`q_function`"
                    )
                final_q = np.asarray(self._q_function(last), np.float32)
            row["final_q"] = final_q
        return row

    def _ragged_rows(self, dtype: np.dtype[Any], values: Any) -> list[Any]:
        """One part of any length: a copy of the value of each environment."""
        rows = values if self._vector else [values]
        return [row if row is None or isinstance(row, str) else np.array(row, dtype) for row in rows]

    def _rows(self, values: Any) -> NDArray[Any]:
        """One part of observations or actions with a leading dimension of environments."""
        array = np.asarray(values)
        if array.dtype.kind == "U":
            # An array of text has room for the longest of its texts alone.
            array = array.astype(object)
        return array if self._vector else array[None]

    def _kept(self, observation: Any) -> Any:
        """A copy of observations, because the environment may reuse the arrays."""
        return self._mapped(self._observation_parts, observation, lambda part: self._rows(part).copy())

    def _mapped(self, parts: Any, value: Any, function: Callable[[Any], NDArray[Any]]) -> Any:
        """A structure of the function's results for each array. `append` refuses a value of another structure."""
        if parts is None:
            return function(value)
        if isinstance(parts, np.dtype):
            return self._ragged_rows(parts, value)
        if isinstance(parts, dict):
            value = named_parts(value, tuple(parts))
        if isinstance(parts, dict) and isinstance(value, Mapping):
            return {name: self._mapped(parts.get(name), part, function) for name, part in value.items()}
        if isinstance(parts, tuple) and isinstance(value, (tuple, list)) and len(value) == len(parts):
            return tuple(self._mapped(*both, function) for both in zip(parts, value, strict=True))
        return value

    def flush(self, timeout: float | None = 60.0) -> None:
        """Sends the steps so far, and waits until they are in the table, as `Writer.flush`."""
        self._append_pending(timeout)
        self._writer.flush(timeout)

    def close(self, timeout: float | None = 60.0) -> None:
        """Sends the remaining steps, and closes the writer (`Writer.close`) and the environment."""
        try:
            self._append_pending(timeout)
            self._writer.close(timeout)
        finally:
            self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            if exception[0] is None:
                self._append_pending(None)
            self._pending = None
            self._writer.__exit__(*exception)
        finally:
            self._env.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def __repr__(self) -> str:
        return f"<Recorder of {self._env!r}, {self._writer!r}>"


def _put(index: int, array: NDArray[Any] | list[Any], value: Any) -> None:
    array[index] = value
