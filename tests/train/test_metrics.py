"""Metrics: what a line says, the files it goes to, and the page it is shown on."""

import dataclasses
import io
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2

from innet_drl.train.diagnostics import Diagnosis
from innet_drl.train.display import plain_line
from innet_drl.train.learner import Update
from innet_drl.train.metrics import ActorReport, Game, Meter, Metrics
from innet_drl.train.metrics_files import MetricsFiles, scalars
from innet_drl.train.page import SMALLEST_PAGE, Page, logs_on_console
from innet_drl.train.prediction import Predictions

TABLE = {
    "items": 90,
    "steps": 100,
    "bytes": 5000,
    "inserted_items": 200,
    "sampled_items": 640,
    "stale_updates": 3,
    "total_priority": 45.0,
    "max_priority": 2.5,
}

REQUIRED = {
    "time_s",
    "env_frames",
    "agent_steps",
    "agent_steps_per_s",
    "learner_updates",
    "learner_updates_per_s",
    "replay_steps",
    "replay_bytes",
    "return_mean",
    "return_best",
    "td_loss",
    "parameter_version",
    "parameter_lag",
    "sample_age",
    "samples_per_insert",
    "stale_updates",
}


def update(loss: float) -> Update:
    return Update(torch.ones(2), torch.tensor(loss), torch.tensor(0.5), torch.tensor(2 * loss), 1e-3)


def filled_meter() -> Meter:
    meter = Meter(environments=4, frames_per_step=4, samples_per_insert=8.0)
    seconds = {"environment": 3.0, "inference": 1.0}
    meter.add_report(ActorReport(0, 100, [Game(0, 1.0, 20), Game(1, 9.0, 30)], 8, seconds, epsilon=0.5))
    predictions = Predictions(20, 30.0, 25.0)
    meter.add_report(
        ActorReport(1, 50, [Game(2, 4.0, 10), Game(3, 6.0, 50)], 6, {"environment": 4.0}, 0.25, predictions=predictions)
    )
    meter.add_update(update(1.0), 10.0, 0.02)
    meter.add_update(update(3.0), 20.0, 0.04)
    return meter


def test_a_line_has_the_required_keys() -> None:
    assert {field.name for field in dataclasses.fields(Metrics)} >= REQUIRED


def test_a_line_sums_up_what_happened() -> None:
    meter = filled_meter()
    meter.add_learner_time({"update": 3.0, "wait": 1.0})
    line = meter.line(updates=10, publications=2, table=TABLE)
    assert (line.agent_steps, line.env_frames) == (150, 600)
    assert line.td_loss == 2.0
    assert line.sample_age == 15.0
    assert line.parameter_lag == 3.0
    assert line.samples_per_insert == 3.2
    assert (line.replay_steps, line.replay_bytes, line.stale_updates) == (100, 5000, 3)
    assert line.learner_time == {"update": 0.75, "wait": 0.25}
    assert line.actor_time == {"environment": 0.875, "inference": 0.125}


def test_an_actor_that_has_left_has_no_part_in_the_lag() -> None:
    meter = filled_meter()
    meter.line(10, 2, TABLE)
    meter.add_report(ActorReport(1, 50, [], 900, {}, 0.25))
    line = meter.line(1_000, 20, TABLE)
    assert (line.parameter_lag, line.epsilon) == (100.0, 0.25)
    assert meter.line(2_000, 20, TABLE).parameter_lag is None


def test_a_line_has_values_against_returns_and_how_priorities_are_spread() -> None:
    meter = filled_meter()
    line = meter.line(10, 2, TABLE)
    assert (line.q_predicted, line.return_discounted) == (1.5, 1.25)
    assert line.learning_rate == 1e-3
    assert (line.priority_total, line.priority_max) == (45.0, 2.5)
    # 90 items, whose sampled ones had 0.03 on the mean.
    assert line.priority_concentration == pytest.approx(2.7)
    after = meter.line(10, 2, TABLE)
    assert (after.q_predicted, after.return_discounted, after.priority_concentration) == (None, None, None)


def test_the_mean_score_is_of_the_half_that_explores_less() -> None:
    line = filled_meter().line(10, 2, TABLE)
    assert line.return_mean == 5.0
    assert line.return_best == 9.0
    assert line.games == 4


def test_lengths_and_epsilon_are_means_over_games_and_actors() -> None:
    line = filled_meter().line(10, 2, TABLE)
    # Of the half of the environments that explores less, as the mean score.
    assert line.length_mean == 30.0
    assert line.epsilon == 0.375
    assert line.gradient_norm == 4.0
    assert line.actor_scores == {"0": 5.0, "1": 5.0}


def test_best_evaluations_throughput_and_waits_of_each_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("innet_drl.train.metrics.time.perf_counter", lambda: now)
    meter = filled_meter()
    now = 110.0
    for mean in (5.0, 7.0, 6.0):
        meter.add_evaluation(mean)
    waits = [{"name": "actor 1", "waited_s": 4.0}, {"name": "actor 0", "waited_s": 0.0}, {"name": "x", "waited_s": 1.0}]
    line = meter.line(10, 2, {**TABLE, "by_writer": waits}, seconds_left=lambda steps_per_s: 600 / steps_per_s)
    assert (line.evaluation_mean, line.evaluation_best) == (6.0, 7.0)
    assert line.actor_steps_per_s == {"0": 10.0, "1": 5.0}
    assert line.actor_waits == {"0": 0.0, "1": 0.4}
    assert line.seconds_left == 40.0
    assert (line.samples_per_insert_now, line.samples_per_insert_target) == (3.2, 8.0)
    # Counts are since the line before; the writer of actor 1 was made anew.
    now = 120.0
    meter.add_report(ActorReport(1, 30, [], 6, {}, epsilon=0.25))
    table = {**TABLE, "inserted_items": 300, "sampled_items": 1440, "by_writer": [{"name": "actor 1", "waited_s": 3.0}]}
    line = meter.line(10, 2, table)
    assert line.actor_steps_per_s == {"1": 3.0}
    assert line.actor_waits == {"1": 0.0}
    assert line.samples_per_insert_now == 8.0
    assert line.seconds_left is None
    # A server that was started again counts from zero.
    assert meter.line(10, 2, TABLE).samples_per_insert_now is None


def test_averages_start_anew_with_each_line() -> None:
    meter = filled_meter()
    meter.line(10, 2, TABLE)
    line = meter.line(10, 2, TABLE)
    assert line.td_loss is None
    assert line.sample_age is None
    assert line.agent_steps_per_s == 0
    assert line.agent_steps == 150


def test_a_diverged_loss_is_null_and_the_line_stays_json() -> None:
    meter = Meter(1, 1, 8.0)
    meter.add_update(update(float("nan")), 0.0, 0.0)
    line = meter.line(1, 1, TABLE)
    assert line.td_loss is None
    json.loads(json.dumps(dataclasses.asdict(line), allow_nan=False))


def test_a_meter_goes_on_from_its_state() -> None:
    meter = filled_meter()
    meter.line(10, 2, TABLE)
    other = Meter(4, 4, 8.0)
    other.restore(json.loads(json.dumps(meter.state())))
    line = other.line(10, 2, TABLE)
    assert (line.agent_steps, line.return_mean, line.return_best, line.games) == (150, 5.0, 9.0, 4)
    assert (line.length_mean, line.actor_scores) == (30.0, {"0": 5.0, "1": 5.0})


def events(folder: Path) -> tuple[dict[str, float], layout_pb2.Layout]:
    """The scalars of a folder with one line of metrics, by tag, and the layout of the tab CUSTOM SCALARS."""
    (file,) = folder.glob("events.out.tfevents.*")
    found: dict[str, float] = {}
    layout = layout_pb2.Layout()
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            plugin = value.metadata.plugin_data.plugin_name
            if plugin == "custom_scalars":
                layout.ParseFromString(value.tensor.string_val[0])
            elif plugin == "scalars":
                assert event.step == 150
                found[value.tag] = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
    return found, layout


def test_a_restarted_learner_does_not_count_waits_again() -> None:
    """The writers of actors that have joined by themselves outlive the learner."""
    meter = Meter(4, 4, 8.0)
    meter.line(10, 2, {**TABLE, "by_writer": [{"name": "actor 1", "waited_s": 40.0}]})
    assert meter.waits_s == {"1": 40.0}
    other = Meter(4, 4, 8.0)
    other.restore(json.loads(json.dumps(meter.state())))
    for waited, since in ((50.0, 0.0), (52.0, 2.0)):
        other.line(10, 2, {**TABLE, "by_writer": [{"name": "actor 1", "waited_s": waited}]})
        assert other.waits_s == {"1": since}


def test_the_same_numbers_go_to_both_files(tmp_path: Path) -> None:
    line = filled_meter().line(10, 2, TABLE)
    files = MetricsFiles(tmp_path)
    files.write(line)
    files.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == dataclasses.asdict(line)
    found, _ = events(tmp_path)
    for tag, value in scalars(line).items():
        assert found[tag] == pytest.approx(value)
    assert {"charts/episodic_return", "charts/SPS", "losses/td_loss", "losses/q_values"} <= found.keys()


def test_charts_of_tensorboard_show_tags_of_the_run(tmp_path: Path) -> None:
    meter = filled_meter()
    meter.add_evaluation(7.0)
    meter.add_learner_time({"wait for a batch": 1.0})
    meter.add_diagnosis(Diagnosis(0.1, 0.9, {"1": 0.0}, None, 0.2, 0.0, 1.0, {"50": 0.3}))
    writers = [{"name": f"actor {actor}", "waited_s": 0.0} for actor in range(2)]
    files = MetricsFiles(tmp_path)
    files.write(meter.line(10, 2, {**TABLE, "by_writer": writers}, seconds_left=lambda _: 95.0))
    files.close()
    found, layout = events(tmp_path)
    assert found["actor_return/0"] == found["actor_return/1"] == 5.0
    assert found["actor_SPS/0"] > found["actor_SPS/1"] > 0.0
    assert found["actor_waits/0"] == found["actor_waits/1"] == 0.0
    (category,) = layout.category
    charts = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    assert {"score of each actor", "Q-loss", "steps in the replay memory"} <= charts.keys()
    shown = {
        title: {tag for expression in expressions for tag in found if re.match(expression, tag)}
        for title, expressions in charts.items()
    }
    assert shown["score of each actor"] == {"actor_return/0", "actor_return/1"}
    assert shown["Q-loss"] == {"losses/td_loss"}
    assert shown["steps in the replay memory"] == {"replay/steps"}
    for title, expressions in charts.items():
        for expression in expressions:
            assert any(re.match(expression, tag) for tag in found), f"{title}: no tag is {expression}"


def test_a_run_that_goes_on_appends_its_lines(tmp_path: Path) -> None:
    line = filled_meter().line(10, 2, TABLE)
    for _ in range(2):
        files = MetricsFiles(tmp_path, line.agent_steps)
        files.write(line)
        files.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_a_killed_run_wrote_after_its_checkpoint_is_dropped(tmp_path: Path) -> None:
    line = filled_meter().line(10, 2, TABLE)

    def write(resumed_at: int, *agent_steps: int) -> None:
        files = MetricsFiles(tmp_path, resumed_at)
        for steps in agent_steps:
            files.write(dataclasses.replace(line, agent_steps=steps, games=steps))
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


def test_updates_after_a_checkpoint_while_actors_waited_are_dropped(tmp_path: Path) -> None:
    line = filled_meter().line(10, 2, TABLE)
    files = MetricsFiles(tmp_path)
    for updates in (10, 12, 15):
        files.write(dataclasses.replace(line, learner_updates=updates))
    files.close()
    MetricsFiles(tmp_path, line.agent_steps, updates=12).close()
    kept = [json.loads(text)["learner_updates"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [10, 12]


def test_the_torn_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"agent_steps": 150}\n{"agent_st')
    MetricsFiles(tmp_path, 1000).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"agent_steps": 150}\n'


def test_seconds_left_out_are_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("innet_drl.train.metrics.time.perf_counter", lambda: now)
    meter = Meter(2, 1, 8.0)
    now = 130.0
    meter.leave_out(20.0)
    assert meter.session_s == 10.0
    assert meter.line(0, 0, TABLE).time_s == 10.0


def test_a_terminal_gets_a_page_and_a_pipe_gets_lines() -> None:
    meter = filled_meter()
    meter.add_learner_time({"wait for a batch": 3.0, "forward": 1.0})
    for mean in (7.0, 6.0):
        meter.add_evaluation(mean)
    line = meter.line(10, 2, TABLE | {"bytes": 5 << 20})
    shown = io.StringIO()
    with Page("breakout", Console(file=shown, force_terminal=True, width=120, height=40)) as page:
        page.say("measuring")
        waits, rates = {"0": 0.0, "1": 0.4}, {"0": 1234.0, "1": 56.0}
        page.show(dataclasses.replace(line, seconds_left=95.0, actor_waits=waits, actor_steps_per_s=rates), "learning")
        page.progress("evaluation", "3 of 30 games")
    assert "breakout" in shown.getvalue()
    assert "measuring" in shown.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    rows = [" ".join(row.strip("│ ").split()) for row in text.splitlines()]
    assert {"actor 0 1", "score 5.00 5.00", "steps/s 1,234 56", "waits 0% 40%"} <= set(rows)
    for expected in (
        r"time 0:00, 1:35 left .*",
        r"score 5.00, best 9.00 loss 2.0000 .*",
        r"evaluation 6.00, best 7.00 replay ratio 3.20 of 8 lag 3 updates",
        r"replay 100 steps, 5 MiB .*",
        r"who waits learner for samples 75% actors for the learner 20%",
    ):
        assert any(re.fullmatch(expected, row) for row in rows), f"no row is {expected}: {rows}"
    assert "evaluation: 3 of 30 games" in shown.getvalue()
    for width in (1000, 120, 40, 10):
        small = io.StringIO()
        with Page("breakout", Console(file=small, force_terminal=True, width=width, height=10)) as page:
            page.show(line, "learning")
        shown_there = small.getvalue().removesuffix("\n")
        whole = plain_line(line, "learning")
        assert whole.startswith(shown_there)
        assert (shown_there == whole) == (len(whole) <= width)
        # As much as fits, and one number at least.
        assert len(shown_there) <= width or "  " not in shown_there
        assert whole.removeprefix(shown_there)[:2] in ("", "  ")
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
            page.show(filled_meter().line(10, 2, TABLE), "learning")
            page.show_note("waiting")
    assert [line.partition("WARNING ")[2] for line in shown.getvalue().splitlines() if "of the log" in line] == logged
    assert "\x1b" not in shown.getvalue()
