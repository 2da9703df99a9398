"""Metrics: what a line says, the files it goes to, and the page it is shown on."""

import dataclasses
import io
import json
import logging
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2

from innet_drl.train.observe.display import SMALLEST_PAGE, Page, logs_on_console, plain_line
from innet_drl.train.observe.metrics import (
    METRICS,
    PANELS,
    ActorReport,
    Game,
    MemoryCounters,
    Meter,
    Totals,
    tags,
    values_of,
)
from innet_drl.train.runs.reporting import MetricsFiles

TABLE = {
    "items": 90,
    "steps": 100,
    "bytes": 5000,
    "inserted_items": 200,
    "sampled_items": 640,
    "stale_updates": 3,
    "total_mass": 45.0,
    "max_priority": 2.5,
}


@dataclasses.dataclass
class Recorded:
    """A meter with what the parts of a run record, and lines of it."""

    meter: Meter = dataclasses.field(default_factory=Meter)
    totals: Totals = dataclasses.field(default_factory=lambda: Totals(environments=4, frames_per_step=4))
    counters: MemoryCounters = dataclasses.field(default_factory=lambda: MemoryCounters(resumed=False))

    def play(self, *reports: ActorReport) -> None:
        for report in reports:
            self.totals.add_report(report, self.meter)

    def line(self, table: dict[str, Any] = TABLE) -> dict[str, float]:
        for rate in ("learner_updates", "samples_per_insert_target"):
            self.meter.record(rate, 8)
        self.meter.record_rate("learner_updates_per_s", 0)
        self.totals.record(self.meter)
        self.counters.record(self.meter, table)
        return self.meter.line()


def recorded() -> Recorded:
    """Two actors have played, and the learner has updated twice."""
    found = Recorded()
    found.play(
        ActorReport(
            0,
            100,
            [Game(0, 1.0, 20), Game(1, 9.0, 30)],
            8,
            {"environment": 3.0, "inference": 1.0},
            {"epsilon": 0.5},
        ),
        ActorReport(1, 50, [Game(2, 4.0, 10), Game(3, 6.0, 50)], 6, {"environment": 4.0}, {"epsilon": 0.25}),
    )
    for value in (1.0, 3.0):
        found.meter.record_mean("td_loss", torch.tensor(value))
        found.meter.record_mean("priority_concentration", torch.tensor(value / 50 + 0.01 * (2 - value)))
    return found


def test_a_line_sums_up_what_happened() -> None:
    found = recorded()
    found.meter.record_seconds("learner_time", {"update": 1.0, "wait": 1.0})
    found.meter.record_seconds("learner_time", {"update": 2.0})
    line = found.line()
    assert (line["agent_steps"], line["env_frames"]) == (150, 600)
    assert line["td_loss"] == 2.0
    assert line["samples_per_insert"] == 3.2
    assert (line["replay_steps"], line["replay_bytes"], line["stale_updates"]) == (100, 5000, 3)
    assert values_of(line, "learner_time") == {"update": 0.75, "wait": 0.25}
    assert values_of(line, "actor_time") == {"environment": 0.875, "inference": 0.125}


def test_a_line_has_how_priorities_are_spread() -> None:
    found = recorded()
    line = found.line()
    assert (line["priority_total"], line["priority_max"]) == (45.0, 2.5)
    # 90 items, whose sampled ones had 0.03 and 0.05 probability.
    assert line["priority_concentration"] == pytest.approx(3.6)
    assert "priority_concentration" not in found.line()


def test_the_mean_score_is_of_the_half_that_explores_less() -> None:
    line = recorded().line()
    assert line["return_mean"] == 5.0
    assert line["return_best"] == 9.0
    assert line["games"] == 4


def test_lengths_and_epsilon_are_means_over_games_and_reports() -> None:
    line = recorded().line()
    # Of the half of the environments that explores less, as the mean score.
    assert line["length_mean"] == 30.0
    assert line["epsilon"] == 0.375
    assert values_of(line, "actor_scores") == {"0": 5.0, "1": 5.0}


def test_best_evaluations_throughput_and_waits_of_each_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("innet_drl.train.observe.metrics.time.perf_counter", lambda: now)
    found = recorded()
    now = 110.0
    for mean in (5.0, 7.0, 6.0):
        found.totals.add_evaluation(mean)
    waits = [{"name": "actor 1", "waited_s": 4.0}, {"name": "actor 0", "waited_s": 0.0}, {"name": "x", "waited_s": 1.0}]
    line = found.line({**TABLE, "by_writer": waits})
    assert (line["evaluation_mean"], line["evaluation_best"]) == (6.0, 7.0)
    assert line["agent_steps_per_s"] == 15.0
    assert values_of(line, "actor_steps_per_s") == {"0": 10.0, "1": 5.0}
    assert values_of(line, "actor_waits") == {"0": 0.0, "1": 0.4}
    assert line["samples_per_insert_now"] == 3.2
    # Counts are since the line before; the writer of actor 1 was made anew.
    now = 120.0
    found.play(ActorReport(1, 30, [], 6, {}))
    table = {**TABLE, "inserted_items": 300, "sampled_items": 1440, "by_writer": [{"name": "actor 1", "waited_s": 3.0}]}
    line = found.line(table)
    assert values_of(line, "actor_steps_per_s") == {"1": 3.0}
    assert values_of(line, "actor_waits") == {"1": 0.0}
    assert line["samples_per_insert_now"] == 8.0
    # A server that was started again counts from zero.
    assert "samples_per_insert_now" not in found.line()


def test_averages_start_anew_with_each_line() -> None:
    found = recorded()
    found.line()
    line = found.line()
    assert not {"td_loss", "epsilon", "actor_time/environment"} & line.keys()
    assert line["agent_steps_per_s"] == 0
    assert line["agent_steps"] == 150


def test_a_diverged_loss_is_left_out_and_the_line_stays_json() -> None:
    found = recorded()
    found.meter.record_mean("td_loss", torch.tensor(float("nan")))
    line = found.line()
    assert "td_loss" not in line
    json.loads(json.dumps(line, allow_nan=False))


def test_an_unknown_metric_is_refused() -> None:
    meter = Meter()
    meter.record("tdloss", 1.0)
    with pytest.raises(KeyError, match="tdloss"):
        meter.line()


def test_a_run_goes_on_from_the_state_of_a_checkpoint() -> None:
    found = recorded()
    found.line()
    other = Recorded()
    other.totals.restore(json.loads(json.dumps(found.totals.state())))
    line = other.line()
    names = ("agent_steps", "return_mean", "return_best", "games", "length_mean")
    assert [line[name] for name in names] == [150, 5.0, 9.0, 4, 30.0]
    assert values_of(line, "actor_scores") == {"0": 5.0, "1": 5.0}
    assert line["agent_steps_per_s"] == 0


def events(folder: Path) -> tuple[dict[str, float], layout_pb2.Layout]:
    """The scalars of a folder with one line of metrics, by tag, and the layout of the tab CUSTOM SCALARS."""
    (file,) = folder.glob("events.out.tfevents.*")
    found: dict[str, float] = {}
    layout = layout_pb2.Layout()
    meanings = {metric.meaning for metric in METRICS.values()}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            plugin = value.metadata.plugin_data.plugin_name
            if plugin == "custom_scalars":
                layout.ParseFromString(value.tensor.string_val[0])
            elif plugin == "scalars":
                assert event.step == 150
                assert value.metadata.summary_description.rpartition(": ")[2] in meanings
                found[value.tag] = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
    return found, layout


def test_a_restarted_learner_does_not_count_again() -> None:
    """The memory of a server, and the writers of actors that have joined by themselves, outlive the learner."""
    counters = MemoryCounters(resumed=True)
    for waited, since in ((50.0, 0.0), (52.0, 2.0)):
        added = counters.record(Meter(), {**TABLE, "by_writer": [{"name": "actor 1", "waited_s": waited}]})
        assert added == {"sampled_items": 0, "inserted_items": 0, "blocked_samples": 0, "actor 1": since}


def test_the_same_numbers_go_to_both_files(tmp_path: Path) -> None:
    line = recorded().line()
    files = MetricsFiles(tmp_path)
    files.write(line)
    files.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == line
    found, _ = events(tmp_path)
    for tag, value in tags(line).items():
        assert found[tag] == pytest.approx(value)
    assert {"charts/episodic_return", "charts/SPS", "losses/td_loss", "actor_SPS/0"} <= found.keys()


def test_charts_of_tensorboard_show_tags_of_the_run(tmp_path: Path) -> None:
    run = recorded()
    run.totals.add_evaluation(7.0)
    run.meter.record_seconds("learner_time", {"wait for a batch": 1.0})
    for name in {name for panel in PANELS.values() for name in panel.curves if "/" not in name}:
        if not name.startswith("actor_"):
            run.meter.record(name, 0.5)
    writers = [{"name": f"actor {actor}", "waited_s": 0.0} for actor in range(2)]
    files = MetricsFiles(tmp_path)
    files.write(run.line({**TABLE, "by_writer": writers}))
    files.close()
    found, layout = events(tmp_path)
    assert found["actor_return/0"] == found["actor_return/1"] == 5.0
    assert found["actor_SPS/0"] > found["actor_SPS/1"] > 0.0
    assert found["actor_waits/0"] == found["actor_waits/1"] == 0.0
    (category,) = layout.category
    charts = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    assert {"Score of each actor", "Q-loss", "Memory"} <= charts.keys()
    shown = {
        title: {tag for expression in expressions for tag in found if re.match(expression, tag)}
        for title, expressions in charts.items()
    }
    assert shown["Score of each actor"] == {"actor_return/0", "actor_return/1"}
    assert shown["Q-loss"] == {"losses/td_loss"}
    assert shown["Memory"] == {"replay/steps"}
    for title, expressions in charts.items():
        for expression in expressions:
            assert any(re.match(expression, tag) for tag in found), f"{title}: no tag is {expression}"


def test_a_run_that_goes_on_appends_its_lines(tmp_path: Path) -> None:
    line = recorded().line()
    for _ in range(2):
        files = MetricsFiles(tmp_path, 150)
        files.write(line)
        files.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_a_killed_run_wrote_after_its_checkpoint_is_dropped(tmp_path: Path) -> None:
    line = recorded().line()

    def write(resumed_at: int, *agent_steps: int) -> None:
        files = MetricsFiles(tmp_path, resumed_at)
        for steps in agent_steps:
            files.write({**line, "agent_steps": steps, "games": steps})
        files.close()

    write(0, 100, 200, 300)
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"agent_steps": 4')
    write(200, 250, 350)
    kept = [json.loads(text)["agent_steps"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [100, 200, 250, 350]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("counts/games")] == kept


def test_a_line_that_a_full_disk_cut_is_completed(tmp_path: Path) -> None:
    line = recorded().line()
    files = MetricsFiles(tmp_path)
    written = [{**line, "games": number} for number in range(20)]
    files.write(written[0])
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, each in enumerate(written[1:]):
        # Room for no more than a part of the longer line, of an event.
        size = max(file.stat().st_size for file in tmp_path.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10 * number, unlimited[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                files.write(each)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        files.write(each)
    files.close()
    assert [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()] == written
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("counts/games")] == list(range(20))


def test_updates_after_a_checkpoint_while_actors_waited_are_dropped(tmp_path: Path) -> None:
    line = recorded().line()
    files = MetricsFiles(tmp_path)
    for updates in (10, 12, 15):
        files.write({**line, "learner_updates": updates})
    files.close()
    MetricsFiles(tmp_path, 150, updates=12).close()
    kept = [json.loads(text)["learner_updates"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [10, 12]


def test_the_torn_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"agent_steps": 150}\n{"agent_st')
    MetricsFiles(tmp_path, 1000).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"agent_steps": 150}\n'


def test_seconds_left_out_are_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("innet_drl.train.observe.metrics.time.perf_counter", lambda: now)
    meter = Meter()
    meter.resume(5.0)
    now = 130.0
    meter.leave_out(20.0)
    assert meter.session_s == 10.0
    assert meter.line()["time_s"] == 15.0


def test_a_terminal_gets_a_page_and_a_pipe_gets_lines() -> None:
    run = recorded()
    run.meter.record_seconds("learner_time", {"wait for a batch": 3.0, "forward": 1.0})
    run.meter.record_mean("parameter_lag", 3)
    for mean in (7.0, 6.0):
        run.totals.add_evaluation(mean)
    line = run.line(TABLE | {"bytes": 5 << 20})
    shown = io.StringIO()
    with Page("breakout", Console(file=shown, force_terminal=True, width=120, height=40)) as page:
        page.say("measuring")
        waits, rates = {"actor_waits/0": 0.0, "actor_waits/1": 0.4}, {"actor_steps_per_s/0": 1234.0}
        page.show({**line, **waits, **rates, "actor_steps_per_s/1": 56.0, "seconds_left": 95.0}, "learning")
        page.progress("evaluation", "3 of 30 games")
    assert "breakout" in shown.getvalue()
    assert "measuring" in shown.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    rows = [" ".join(row.strip("│ ").split()) for row in text.splitlines()]
    assert {
        "time_s 0:00 seconds_left 1:35",
        "return_mean 5.00 return_best 9.00",
        "evaluation_mean 6.00 evaluation_best 7.00",
        "td_loss 2.0000 q_mean -",
        "samples_per_insert_now 3.20 samples_per_insert_target 8.00",
        "replay_steps 100 replay_bytes 5 MiB",
        "actor_scores 0: 5.00 1: 5.00",
        "actor_steps_per_s 0: 1,234 1: 56",
        "actor_waits 0: 0% 1: 40%",
        "learner_time wait for a batch: 75% forward: 25%",
    } <= set(rows)
    assert "evaluation: 3 of 30 games" in shown.getvalue()
    small = io.StringIO()
    with Page("breakout", Console(file=small, force_terminal=True, width=40, height=10)) as page:
        page.show(line, "learning")
    assert small.getvalue() == plain_line(line, "learning") + "\n"
    piped = io.StringIO()
    console = Console(file=piped, width=40)
    with logs_on_console(console), Page("breakout", console) as page:
        page.show(line, "learning")
        # As an environment's module may do.
        others = logging.StreamHandler(again := io.StringIO())
        logging.getLogger().addHandler(others)
        logging.getLogger("innet_drl").warning("a line of the core")
        logging.getLogger().removeHandler(others)
    assert again.getvalue() == ""
    assert plain_line(line, "learning") in piped.getvalue()
    assert "WARNING a line of the core" in piped.getvalue()


def test_a_page_says_that_the_run_starts_before_its_first_numbers() -> None:
    shown = io.StringIO()
    with Page("breakout", Console(file=shown, force_terminal=True, width=120, height=40)):
        assert "breakout" in shown.getvalue()
        assert "starting" in shown.getvalue()


@pytest.mark.parametrize(("width", "height"), [(SMALLEST_PAGE[0] - 1, 40), (120, SMALLEST_PAGE[1] - 1), (30, 5)])
def test_a_small_terminal_keeps_every_line_of_the_log(width: int, height: int) -> None:
    """No page is drawn there, which would move the cursor over the lines."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=width, height=height)
    logged = [f"line {number} of the log" for number in range(3 * height)]
    with logs_on_console(console), Page("breakout", console) as page:
        for number, line in enumerate(logged):
            logging.getLogger("innet_drl").warning(line)
            page.progress("evaluation", f"{number} games")
            page.show(recorded().line(), "learning")
            page.show_note("waiting")
    assert [line.partition("WARNING ")[2] for line in shown.getvalue().splitlines() if "of the log" in line] == logged
    assert "\x1b" not in shown.getvalue()
