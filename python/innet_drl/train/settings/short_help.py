"""`innet-drl train --help`: ten flags, and the names of all others in groups. `--help-all` explains each."""

from __future__ import annotations

import textwrap

from innet_drl.train.settings.config import PRESETS, SLICES, Config
from innet_drl.train.settings.values import plain

FIRST = {
    "preset": "one of {presets}",
    "environment": "atari/<game>, a Gymnasium id such as CartPole-v1, or module:factory",
    "minutes": "end after so many minutes of this session",
    "steps": "end at so many steps of all actors",
    "seed": "seed of networks, environments and exploration",
    "actors": "actor processes; auto is the number for this machine's cores",
    "learning-rate": "Adam's step size",
    "replay": "embedded, or the address of innet-replay serve",
    "out": "the run's folder; runs/<name>-<date>-<time> by default",
    "resume": "folder of a run to continue",
}
"""The first flags, and what they are for."""

WIDTH, INDENT = 100, "    "


def short_help(command: str, preset: str) -> str:
    """The help of a command, with the defaults of a preset."""
    values = plain(vars(PRESETS[preset]))
    lines = [f"usage: innet-drl {command} [--preset NAME] [flags]", "", "Train an agent with prioritized replay.", ""]
    for flag, meaning in FIRST.items():
        default = preset if flag == "preset" else values.get(flag.replace("-", "_"))
        shown = "" if default is None else f" ({default})"
        lines.append(f"  --{flag:<15} {meaning.format(presets=', '.join(PRESETS))}{shown}")
    lines += ["", f"Settings, each a flag, with the defaults of the preset ({preset}):", ""]
    for each in SLICES:
        lines.append(f"  {'Run' if each is Config else each.__name__.removesuffix('Settings')}")
        flags = " ".join(f"--{name.replace('_', '-')}" for name in each.__annotations__)
        lines.append(
            textwrap.fill(flags, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
        )
    launcher = " --launcher" if command == "train" else ""
    lines += [
        "  Also",
        f"    --config{launcher} --track",
        "",
        f"innet-drl {command} --help-all explains each flag.",
    ]
    return "\n".join(lines) + "\n"
