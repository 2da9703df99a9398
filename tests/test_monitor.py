"""Statistics over HTTP: what Prometheus, supervisors, browsers and `innet-replay top` see of a server."""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
import yaml
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import innet_drl as innet
from innet_drl import errors
from serving import SERVER_CLI, until
from steps import VIEW, fill, table

EXAMPLES = Path(__file__).parents[1] / "examples" / "monitoring"
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
def server() -> Iterator[innet.Server]:
    """A server with a table that was written, sampled and updated, and with parameters."""
    tables = [table(NAME, samples_per_insert=4.0, slack=1000.0), table("empty")]
    with innet.Memory(tables) as memory, memory.serve("innet://127.0.0.1:0", http="127.0.0.1:0") as server:
        with innet.connect(server.addresses[0]) as replay:
            fill(replay, 200, name=NAME)
            batch = replay.sample(NAME, 64, VIEW, timeout=10)
            replay.update_priorities(NAME, batch.ids, np.ones(64))
            for _ in range(3):
                replay.put_parameters("policy", {"w": np.ones(3, np.float32)})
            assert replay.get_parameters("policy", newer_than=1) is not None
        yield server


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
        *numbers("table", stats["tables"][NAME]),
        *numbers("writer", {"steps": 0, "blocked_pushes": 0, "waited_s": 0}),
        *numbers("parameters", stats["parameters"]["policy"]),
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


def test_a_server_with_a_token_asks_for_it(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key, ca = (tmp_path / name for name in ("chain.pem", "key.pem", "ca.pem"))
    authority.cert_pem.write_to_path(str(ca))
    certificate.private_key_pem.write_to_path(str(key))
    for one in certificate.cert_chain_pems:
        one.write_to_path(str(chain), append=True)
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


def test_top_shows_the_server_again_and_again(server: innet.Server) -> None:
    with subprocess.Popen([*SERVER_CLI, "top", server.addresses[0]], stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        # Empty lines are between the parts of a screen, and one more at its end.
        screens = ["", ""]
        for number in range(2):
            while "policy" not in screens[number]:
                screens[number] += top.stdout.readline()
        top.kill()
    for screen in screens:
        assert f"innet-replay {innet.__version__}  up " in screen
        assert NAME.replace("\n", "\\n") in screen
        assert "update_priorities" in screen
        assert "0 requests/s" in screen


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
    scraped = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in scraped] == ["innet-replay"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(server: innet.Server, tmp_path: Path, scheme: str) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium: apt install chromium")
    picture = tmp_path / "page.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/profile",
        "--enable-logging=stderr",
        "--window-size=1200,1000",
        # Virtual milliseconds: the page asks for the statistics every thousand.
        "--virtual-time-budget=5000",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
    ]
    command = [chromium, *flags, "--dump-dom", f"--screenshot={picture}", f"{server.http}/"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    text = re.sub(r"(?s)<script>.*?</script>|<[^>]*>", " ", shown.stdout)
    for part in ("quoted", "200 of 1,000 steps", "samples per insert, 4 wanted", "policy", "update_priorities"):
        assert part in text, text
    # The name is text, not a part of the page.
    assert "&lt;b&gt;bold&lt;/b&gt;" in shown.stdout
    assert "no answer" not in text
    assert picture.stat().st_size > 10_000
