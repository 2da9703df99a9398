"""Statistics over HTTP: what Prometheus, supervisors, browsers and `innet-replay stats` see of a server."""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
import yaml
from PIL import Image
from places import ROOT
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from serving import SERVER_CLI, until
from steps import VIEW, fill, step, table
from wire_client import SCHEMA, WireClient

import innet_drl as innet
from innet_drl import errors

EXAMPLES = ROOT / "examples" / "monitoring"
TOKEN = "secret of the tests"
NAME = 'quoted "name" \\ \n <b>bold</b>'


def get(url: str, tls_ca: Path | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of an answer."""
    trust = ssl.create_default_context(cafile=tls_ca) if tls_ca else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=trust) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def scrape(url: str) -> dict[str, Metric]:
    """Metrics by name, as Prometheus' own client reads them."""
    status, text = get(f"{url}/metrics")
    assert status == 200
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return {family.name: family for family in families}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[innet.Server]:
    """A server with a table that was written, sampled and updated, with parameters, and with a snapshot."""
    tables = [table(NAME, samples_per_insert=4.0, slack=1000.0), table("empty")]
    with (
        innet.Memory(tables) as memory,
        memory.serve(
            "innet://127.0.0.1:0", http="127.0.0.1:0", snapshot=tmp_path / "snapshots", snapshot_every=0.2
        ) as server,
    ):
        with innet.connect(server.addresses[0]) as replay:
            with replay.writer(NAME, 1, VIEW) as writer:
                replay.put_parameters("policy", {"w": np.ones(3, np.float32)})
                assert replay.get_parameters("policy", writer=writer) is not None
                for _ in range(2):
                    replay.put_parameters("policy", {"w": np.ones(3, np.float32)})
                for t in range(200):
                    writer.append(**step(t))
            batch = replay.sample(NAME, 64, VIEW, timeout=10)
            replay.update_priorities(NAME, batch.ids, np.ones(64))
            assert replay.get_parameters("policy", newer_than=1) is not None
            until(lambda: replay.stats()["snapshots"]["saved"] > 0)
        yield server


def test_the_sum_of_priorities_is_after_the_exponent_and_missing_for_an_order() -> None:
    tables = [
        table("sum", priority_exponent=1.0),
        table("alpha 0", priority_exponent=0.0),
        table("uniform", sampler="uniform"),
        *(table(name, sampler=name, max_times_sampled=1) for name in ("fifo", "lifo", "max_heap", "min_heap")),
    ]
    with innet.Memory(tables) as memory, memory.serve("innet://127.0.0.1:0", http="127.0.0.1:0") as server:
        for each in tables:
            fill(memory, 20, name=each.name, priority=3.0)
        stats = memory.stats()["tables"]
        items = stats["sum"]["items"]
        expected = {"sum": 3.0 * items, "alpha 0": items, "uniform": items}
        assert {name: one["total_mass"] for name, one in stats.items()} == dict.fromkeys(stats) | expected
        assert server.http is not None
        samples = scrape(server.http)["innet_table_total_mass"].samples
        assert {one.labels["table"]: one.value for one in samples} == expected


def numbers(prefix: str, stats: dict[str, Any]) -> Iterator[str]:
    """Names of the metrics that the statistics of one group must have."""
    for name, value in stats.items():
        if isinstance(value, bool | int | float) or (isinstance(value, dict) and "buckets" in value):
            yield re.sub("_s$", "_seconds", f"innet_{prefix}_{name}")


def test_every_statistic_is_a_metric(server: innet.Server) -> None:
    assert server.http is not None
    families = scrape(server.http)
    status, text = get(f"{server.http}/stats")
    assert status == 200
    stats = json.loads(text)
    wanted = {
        *numbers("memory", stats),
        *numbers("server", stats["server"]),
        # Before the first push it has no number.
        *numbers("table", stats["tables"][NAME] | {"last_push_s": 0}),
        *numbers("writer", {"steps": 0, "blocked_pushes": 0, "waited_s": 0, "connected": True, "last_push_s": 0}),
        *numbers("parameters", stats["parameters"]["policy"]),
        *numbers("snapshots", stats["snapshots"]),
        "innet_server",
        "innet_server_latency_seconds",
    }
    assert families.keys() == wanted
    assert all(family.documentation for family in families.values())


def test_metrics_have_the_values_of_the_statistics(server: innet.Server) -> None:
    assert server.http is not None
    families = scrape(server.http)

    def value(metric: str, sample: str = "", **labels: str) -> float:
        found = [one for one in families[metric].samples if one.name == metric + sample and one.labels == labels]
        assert len(found) == 1, families[metric].samples
        return found[0].value

    labels = {"table": NAME}
    assert value("innet_table_steps", **labels) == 200
    assert value("innet_table_inserted_steps", "_total", **labels) == 200
    assert value("innet_table_inserted_steps", "_total", table="empty") == 0
    assert value("innet_table_updated_priorities", "_total", **labels) == 64
    assert value("innet_table_samples_per_insert", **labels) == 4
    assert value("innet_table_slack", **labels) == 1000
    # The writer has made all of them with the first of three versions.
    pushes = value("innet_table_version_lag", "_count", **labels)
    assert value("innet_table_version_lag", "_sum", **labels) == 2 * pushes > 0
    assert value("innet_table_sample_age", "_count", **labels) == 64
    assert value("innet_table_sample_age", "_bucket", le="+Inf", **labels) == 64
    assert value("innet_table_sample_age", "_sum", **labels) < 64 * 200
    assert value("innet_parameters_version", name="policy") == 3
    assert value("innet_parameters_lag", "_sum", name="policy") == 2
    assert value("innet_server_latency_seconds", "_count", request="sample") == 1
    assert 0 < value("innet_server_latency_seconds", "_sum", request="sample") < 60
    (information,) = families["innet_server"].samples
    assert information.labels["release"] == innet.__version__


def test_snapshots_have_metrics(tmp_path: Path) -> None:
    with (
        innet.Memory([table()]) as memory,
        memory.serve("innet://127.0.0.1:0", http="127.0.0.1:0", snapshot=tmp_path, snapshot_every=0.02) as server,
        innet.connect(server.addresses[0]) as replay,
    ):
        assert server.http is not None
        while not replay.stats()["snapshots"]["saved"]:
            pass
        families = scrape(server.http)
        assert set(numbers("snapshots", replay.stats()["snapshots"])) == {
            name for name in families if name.startswith("innet_snapshots")
        }
        (bytes_,) = families["innet_snapshots_bytes"].samples
        (failed,) = families["innet_snapshots_failed"].samples
        assert bytes_.value > 0
        assert failed.value == 0


def test_the_room_of_the_rate_limiter_follows_from_the_statistics() -> None:
    limited = table(samples_per_insert=2.0, slack=8.0, min_size=4)
    view = innet.NStep(n=1, observation="frame")
    with innet.Memory(limited) as memory:

        def lead() -> float:
            stats = memory.stats()["tables"]["t"]
            inserted = stats["limiter_inserted"] - stats["min_size"]
            return float(stats["samples_per_insert"] * inserted - stats["limiter_sampled"])

        slack = memory.stats()["tables"]["t"]["slack"]
        with memory.writer("t", 1, view, chunk_steps=1) as writer:

            def insert(first: int, count: int) -> None:
                # Each step ends an episode, so it is an item.
                for t in range(first, first + count):
                    writer.append(**step(t, episode=1))
                    writer.flush(timeout=0)

            insert(0, 4)
            assert (slack - lead()) / 2 == 4
            insert(4, 4)
            with pytest.raises(errors.DeadlineError):
                insert(8, 1)
            assert slack + lead() == 16
            memory.sample("t", 14, view, timeout=0)
            # A sample that waits gets the step that waited for it, which allows two more.
            with pytest.raises(errors.DeadlineError):
                memory.sample("t", 5, view, timeout=0)
            memory.sample("t", 4, view, timeout=0)


def test_waiting_calls_are_seen_with_their_reason() -> None:
    limited = table(min_size=50)
    with innet.Memory(limited) as memory, memory.serve("innet://127.0.0.1:0", http="127.0.0.1:0") as server:
        assert server.http is not None

        def stats() -> dict[str, Any]:
            read: dict[str, Any] = json.loads(get(f"{server.http}/stats")[1])["tables"]["t"]
            return read

        assert (stats()["waiting_samples"], stats()["samples_wait_for"]) == (0, None)
        with innet.connect(server.addresses[0]) as client, ThreadPoolExecutor() as other:
            sampled = other.submit(client.sample, "t", 4, VIEW, timeout=60)
            until(lambda: stats()["waiting_samples"] == 1)
            assert "min_size" in stats()["samples_wait_for"]
            families = scrape(server.http)
            (waiting,) = families["innet_table_waiting_samples"].samples
            assert waiting.value == 1
            fill(client, 100)
            assert len(sampled.result()) == 4
        assert stats()["waiting_samples"] == 0


def test_gradient_jobs_have_metrics() -> None:
    with (
        innet.Memory() as memory,
        memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0", http="127.0.0.1:0") as server,
    ):
        assert server.http is not None
        with (
            innet.connect(server.addresses[0]) as learner,
            learner.join_gradients("job", worker=0, workers=1) as worker,
        ):
            worker.sum(np.ones(1000, np.float32))
            families = scrape(server.http)
    (joined,) = families["innet_gradients_job_joined"].samples
    assert (joined.labels, joined.value) == ({"job": "job"}, 1)
    (sums,) = families["innet_gradients_sums"].samples
    assert sums.value >= 3


def test_paths_methods_and_health(server: innet.Server) -> None:
    url = server.http
    assert url is not None
    assert get(f"{url}/healthz") == (200, "ok\n")
    status, text = get(f"{url}/nothing")
    assert status == 404
    assert "/metrics" in text
    posted = urllib.request.Request(f"{url}/stats", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(posted)
    with refused.value:
        assert refused.value.code == 405
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(f"{url}/healthz")


def write_certificate(folder: Path, end: datetime) -> tuple[Path, Path, Path]:
    """A certificate that is valid until `end`, its key, and its authority's certificate."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", not_after=end)
    chain, key, ca = (folder / name for name in ("chain.pem", "key.pem", "ca.pem"))
    authority.cert_pem.write_to_path(str(ca))
    certificate.private_key_pem.write_to_path(str(key))
    for one in certificate.cert_chain_pems:
        one.write_to_path(str(chain), append=True)
    return chain, key, ca


def test_a_server_with_a_token_asks_for_it(tmp_path: Path) -> None:
    end = datetime(2037, 1, 1, tzinfo=UTC)
    chain, key, ca = write_certificate(tmp_path, end)
    with (
        innet.Memory() as memory,
        memory.serve(
            "innets://127.0.0.1:0",
            token="token of the operator",
            actor_token=TOKEN,
            tls_cert=chain,
            tls_key=key,
            http="127.0.0.1:0",
        ) as server,
    ):
        url = server.http
        assert url is not None
        assert url.startswith("https://127.0.0.1:")
        assert get(f"{url}/healthz", ca) == (200, "ok\n")
        status, text = get(f"{url}/metrics", ca)
        assert status == 401
        assert "token" in text
        basic = base64.b64encode(f"prometheus:{TOKEN}".encode()).decode()
        for header in (f"Bearer {TOKEN}", f"Basic {basic}", "Bearer token of the operator"):
            assert get(f"{url}/metrics", ca, Authorization=header)[0] == 200
        assert get(f"{url}/", ca, Authorization="Bearer some other secret")[0] == 401
        stats = json.loads(get(f"{url}/stats", ca, Authorization=f"Bearer {TOKEN}")[1])
        assert stats["server"]["failed_logins"] == 1
        begun = time.time()
        text = get(f"{url}/metrics", ca, Authorization=f"Bearer {TOKEN}")[1]
        left = re.findall(r"^innet_tls_certificate_expires_seconds (\S+)$", text, re.MULTILINE)
        assert end.timestamp() - time.time() - 1 <= float(*left) <= end.timestamp() - begun + 1


def test_an_address_in_use_ends_the_start_before_anything_is_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy, innet.Memory() as memory:
        port = busy.getsockname()[1]
        with pytest.raises(errors.StorageError, match=rf"cannot listen on http://127.0.0.1:{port} \(--http\)"):
            memory.serve(f"unix://{tmp_path}/s", http=f"127.0.0.1:{port}")
        assert not (tmp_path / "s").exists()
        for address, reason in [("0.0.0.0:0", "needs a token"), ("innet://a:1", "http://host:port")]:
            with pytest.raises(errors.ConfigError, match=reason):
                memory.serve(f"unix://{tmp_path}/s", http=address)


def test_the_command_names_the_address(tmp_path: Path) -> None:
    serve = [*SERVER_CLI, "serve", "--listen", f"unix://{tmp_path}/s", "--http", "127.0.0.1:0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        url = ready.split()[-1]
        assert ready.split()[-2] == "statistics"
        assert get(f"{url}/healthz") == (200, "ok\n")
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_the_command_ends_in_one_line_if_the_port_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        url = f"127.0.0.1:{busy.getsockname()[1]}"
        serve = [*SERVER_CLI, "serve", "--listen", f"unix://{tmp_path}/s", "--http", url]
        ended = subprocess.run(serve, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        f"innet-replay: cannot listen on http://{url} (--http): choose another port, or end the program"
    )
    assert "Address already in use" in line
    assert not (tmp_path / "s").exists()


def test_health_is_503_while_the_server_answers_its_last_request(tmp_path: Path) -> None:
    large = np.zeros(4_000_000, np.float32)
    serve = [*SERVER_CLI, "serve", "--listen", f"unix://{tmp_path}/s", "--http", "127.0.0.1:0"]
    serve += ["--drain-deadline-ms", "60000"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with innet.connect(f"unix://{tmp_path}/s") as replay:
            replay.put_parameters("large", {"w": large})
        with WireClient(f"{tmp_path}/s") as client:
            # The sockets' buffers do not hold the reply, so it is under way until the client reads it.
            client.send(getParameters=SCHEMA.GetParameters.new_message(name="large"))
            until(lambda: json.loads(get(f"{url}/stats")[1])["reply_bytes"] > large.nbytes)
            assert get(f"{url}/healthz") == (200, "ok\n")
            process.terminate()
            until(lambda: get(f"{url}/healthz") == (503, "shutting down\n"))
            assert get(f"{url}/metrics")[0] == 200
            reply, payload = client.receive()
            assert reply.which() == "parameters"
            assert len(payload) > large.nbytes
        assert process.wait() == 0
    with pytest.raises(urllib.error.URLError):
        get(f"{url}/healthz")


def test_clients_that_hang_keep_no_connection(tmp_path: Path) -> None:
    serve = [*SERVER_CLI, "serve", "--listen", f"unix://{tmp_path}/s", "--http", "127.0.0.1:0"]
    serve += ["--handshake-deadline-ms", "100"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with ExitStack() as clients:
            # More than the server accepts at a time, and more answers than the sockets hold.
            for _ in range(64):
                client = clients.enter_context(socket.create_connection(address))
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 4000)
            with urllib.request.urlopen(f"{url}/healthz", timeout=30) as answer:
                assert answer.read() == b"ok\n"
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_idle_clients_keep_no_supervisor_out(server: innet.Server) -> None:
    assert server.http is not None
    address = ("127.0.0.1", int(server.http.rpartition(":")[2]))
    with ExitStack() as clients:
        for _ in range(64):
            clients.enter_context(socket.create_connection(address))
        # The server would close idle ones after ten seconds, sixteen at a time.
        with urllib.request.urlopen(f"{server.http}/healthz", timeout=9) as answer:
            assert answer.read() == b"ok\n"


def test_watched_statistics_have_the_increase_per_second(server: innet.Server) -> None:
    watch = [*SERVER_CLI, "stats", "--watch", "1", server.addresses[0]]
    table = "tables " + NAME.replace("\n", "\\n")
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        # Each look is at least one request, so the second one has an increase.
        looks = ["", ""]
        for number in range(2):
            while not {"server latency_s", table} <= set(looks[number].splitlines()):
                looks[number] += watching.stdout.readline()
        watching.kill()
    assert not re.search(r"/s$", looks[0], re.MULTILINE), looks[0]
    assert re.search(r" requests +[\d,]+  [\d.]+/s$", looks[1], re.MULTILINE), looks[1]


def test_the_dashboard_asks_for_metrics_that_exist(server: innet.Server) -> None:
    assert server.http is not None
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"innet_\w+", query)}
    assert len(asked) > 20
    families = scrape(server.http)
    samples = {sample.name for family in families.values() for sample in family.samples}
    assert {name for name in asked - samples if not name.startswith("innet_gradients_")} == {
        "innet_writer_waited_seconds_total"  # no writer is open
    }
    assert {"innet_gradients_job_round", "innet_gradients_job_halted"} < asked
    assert {"innet_snapshots_age_seconds", "innet_snapshots_failed_total", "innet_table_version_lag_bucket"} < asked
    scraping = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    assert [job["job_name"] for job in scraping["scrape_configs"]] == ["innet-replay"]
    assert scraping["rule_files"] == ["alerts.yml"]
    groups = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    by_rule = [re.findall(r"innet_\w+", rule["expr"]) for rule in rules]
    assert [rule["expr"] for rule, names in zip(rules, by_rule, strict=True) if not names] == [
        'up{job="innet-replay"} == 0'
    ]
    watched = {name for names in by_rule for name in names}
    assert watched - samples == {"innet_tls_certificate_expires_seconds"}  # this server has no certificate
    shown = {name for rule in rules for name in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])}
    assert shown == {"instance", "table"}


@contextmanager
def pushed_between(server: innet.Server) -> Iterator[tuple[str, list[int]]]:
    """A server of the same pages that pushes ten steps before each look at the statistics; the steps at each look."""
    looks: list[int] = []
    turn = threading.Lock()

    class Between(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with turn:
                if self.path == "/stats":
                    fill(replay, 10, name=NAME)
                    looks.append(replay.stats()["tables"][NAME]["steps"])
                with urllib.request.urlopen(f"{server.http}{self.path}") as answer:
                    content = answer.read()
            self.send_response(200)
            for name in ("Content-Type", "Content-Security-Policy"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with (
        innet.connect(server.addresses[0]) as replay,
        ThreadingHTTPServer(("127.0.0.1", 0), Between) as between,
        ThreadPoolExecutor() as thread,
    ):
        thread.submit(between.serve_forever, 0.01)
        try:
            yield f"http://127.0.0.1:{between.server_address[1]}", looks
        finally:
            between.shutdown()


@pytest.fixture
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium: apt install chromium")
    return found


def browse(chromium: str, url: str, picture: Path, scheme: str) -> str:
    """The page's elements after a few seconds, also as a picture."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={picture.parent}/profile",
        "--enable-logging=stderr",
        "--window-size=1200,1300",
        # Virtual milliseconds: the page asks for the statistics every thousand.
        "--virtual-time-budget=5000",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
    ]
    command = [chromium, *flags, "--dump-dom", f"--screenshot={picture}", f"{url}/"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    return shown.stdout


def test_a_browser_shows_the_page_live(server: innet.Server, chromium: str, tmp_path: Path) -> None:
    # No further snapshot can be saved.
    (tmp_path / "snapshots").rename(tmp_path / "moved")
    until(lambda: json.loads(get(f"{server.http}/stats")[1])["snapshots"]["failed"] > 0)
    with pushed_between(server) as (url, looks):
        page = browse(chromium, url, tmp_path / "page.png", "light")
    (tmp_path / "moved").rename(tmp_path / "snapshots")
    text = re.sub(r"(?s)<script>.*?</script>|<[^>]*>", " ", page)
    for part in ("quoted", "samples per insert, 4 wanted", "Writers 2 versions behind", "update_priorities"):
        assert part in text, text
    # The name is text, not a part of the page.
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "no answer" not in text
    # Of the looks at the server, the page shows a later one: it had 200 steps before the first.
    steps = re.findall(r"(\d+) of 1,000 steps", text)[-1]
    assert len(looks) > 2
    assert int(steps) in looks[1:]
    (rate,) = set(re.findall(r"steps in ([\d.]+)/s", text)) - {"0"}
    assert float(rate) > 0
    cells = re.search(r"Snapshots\s+last\s+size\s+took\s+saved\s+failed\s+[\d.]+ \w?s ago .*?(\d+)\s+(\d+)\s", text)
    assert cells is not None, text
    assert min(int(cells[1]), int(cells[2])) > 0
    assert "Snapshots have failed since the start" in text


def test_the_page_is_dark_where_the_browser_is(server: innet.Server, chromium: str, tmp_path: Path) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        picture = tmp_path / f"{scheme}.png"
        browse(chromium, str(server.http), picture, scheme)
        with Image.open(picture) as image:
            pixels = np.asarray(image.convert("L"))
        # Text and lines stand out from the ground in both.
        assert pixels.std() > 5
        brightness[scheme] = pixels.mean()
    assert brightness["dark"] < 64
    assert brightness["light"] > 192
