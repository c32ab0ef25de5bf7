# SPDX-License-Identifier: Apache-2.0
"""The page over HTTP, and what the commands make of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import make_server

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvpass
from kvpass.cli import main, top
from kvpass.errors import ConfigError, MetricsError
from kvpass.metrics import MetricsServer, client, read_page
from tests.runtime.harness import Driver


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with kvpass.serve_metrics(port=0) as running:
        yield running


@pytest.fixture
def driver() -> Driver:
    made = Driver(size=2)
    made.append(70)
    made.manager.settle()
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out = capsys.readouterr()
    return int(caught.value.code or 0), out.out, out.err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_both_pages_say_the_same(server: MetricsServer, driver: Driver) -> None:
    assert server.host == "127.0.0.1" and server.url.endswith(f":{server.port}/metrics")
    text = client.fetch_metrics(server.port)
    tokens = {
        sample.labels["manager"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvpass_tokens"
    }
    page = client.fetch_page(server.port)
    assert page.process == os.getpid() and page.version == kvpass.__version__
    (mine,) = [s for s in page.managers if s.manager == driver.manager.number]
    assert mine.tokens == tokens[str(driver.manager.number)] == 2 * 70
    now = driver.manager.snapshot()
    assert (mine.counters, mine.tiers, mine.blocks) == (now.counters, now.tiers, now.blocks)
    assert "process_resident_memory_bytes" in text


def test_a_closed_server_frees_its_port() -> None:
    port = free_port()
    for _ in range(2):
        server = kvpass.serve_metrics(port)
        assert server.port == port
        # Connections that linger must not keep the port.
        assert server._server.socket.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        server.close()
        server.close()
    with pytest.raises(MetricsError, match="no metrics at"):
        client.fetch(port)


def test_two_servers_in_one_process(server: MetricsServer) -> None:
    with kvpass.serve_metrics(0) as second:
        assert second.port != server.port
        assert client.fetch_metrics(second.port)
    assert client.fetch_metrics(server.port)


def test_a_port_in_use_is_named_with_the_fix(server: MetricsServer) -> None:
    with pytest.raises(MetricsError, match=rf"port {server.port}: .*in use; give another port"):
        kvpass.serve_metrics(server.port)


@pytest.mark.parametrize("port", [-1, 65536, True, "9464", 1.5, None])
def test_what_is_no_port(port: Any) -> None:
    with pytest.raises(ConfigError, match="write a whole number from 0 to 65535"):
        kvpass.serve_metrics(port)


def test_what_is_no_host_here() -> None:
    with pytest.raises(ConfigError, match="write an address"):
        kvpass.serve_metrics(0, host=" ")
    with pytest.raises(MetricsError, match="cannot be served on 192.0.2.1"):  # RFC 5737
        kvpass.serve_metrics(0, host="192.0.2.1")


def test_other_paths_are_not_found(server: MetricsServer) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as caught:
        opener.open(f"http://127.0.0.1:{server.port}/other")
    assert caught.value.code == 404
    caught.value.close()


def test_scrapes_beside_steps(server: MetricsServer) -> None:
    """Readers never see half a step: what is stored fits what is used."""
    driver = Driver(hot="64KiB", heat_interval=4)
    faults: list[object] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set():
            for snapshot in client.fetch_page(server.port).managers:
                if snapshot.manager == driver.manager.number:
                    for use in snapshot.tiers.values():
                        if not use.stored <= use.used == use.held:
                            faults.append(snapshot)

    reader = threading.Thread(target=scrape)
    reader.start()
    try:
        for tokens in [40, *([1] * 80), 50, *([1] * 20)]:
            driver.append(tokens)
    finally:
        done.set()
        reader.join()
    assert not faults
    driver.check()


def test_a_proxy_is_not_asked(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert client.fetch_metrics(server.port)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_shows_no_caches_of_its_parent(driver: Driver) -> None:
    from kvpass.metrics.page import page

    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, str(len(page().managers)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"0"
    assert len(page().managers) >= 1
    os.close(read)
    os.close(write)


# ------------------------------------------------------------------- commands


def test_metrics_prints_either_page(
    server: MetricsServer, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "metrics", "--port", str(server.port))
    assert code == 0 and "# TYPE kvpass_steps_total counter" in out
    code, out, _ = run(capsys, "metrics", "--port", str(server.port), "--json")
    assert code == 0
    assert driver.manager.number in [s["manager"] for s in json.loads(out)["managers"]]


@pytest.mark.parametrize(
    "command", [["metrics"], ["metrics", "--json"], ["top", "--once"], ["doctor", "--live"]]
)
def test_nothing_listens(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    code, out, err = run(capsys, *command, "--port", str(port))
    assert (code, out) == (1, "")
    assert f"127.0.0.1:{port}" in err and "kvpass.serve_metrics" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>hello</html>", "no page of metrics"),
        (b"# TYPE a counter\na_total 1\n", "another program's port"),
    ],
)
def test_another_programs_port(body: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    def other(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [("Content-Type", "text/plain")])
        return [body]

    with make_server("127.0.0.1", 0, other) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        try:
            found = run(capsys, "metrics", "--port", str(running.server_port))
            page = run(capsys, "metrics", "--json", "--port", str(running.server_port))
        finally:
            running.shutdown()
            thread.join()
    assert found[0] == page[0] == 1
    assert words in found[2]
    assert "not a page of snapshots" in page[2]


def test_top_once(
    server: MetricsServer,
    driver: Driver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run(capsys, "top", "--port", str(server.port), "--once", "--interval", "50ms")
    assert code == 0
    mine = out[out.index(f"cache {driver.manager.number} on cpu") :]
    for word in ("hot", "cold", "hit ratio", "store", "load", "queue", "threshold", "0.80"):
        assert word in mine, out
    assert f"{driver.batch.first_row}.1" in mine
    assert "4 blocks" not in mine and "8 blocks" in mine  # 2 layers x 2 sequences x 2 full blocks


def test_top_ends_with_the_process(
    server: MetricsServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = iter(range(3))

    def sleep(seconds: float) -> None:
        assert seconds == 0.25
        if next(sleeps) == 1:
            server.close()

    monkeypatch.setattr(top.time, "sleep", sleep)
    code, out, err = run(capsys, "top", "--port", str(server.port), "--interval", "0.25")
    assert code == 0, err
    assert f"process {os.getpid()} does not answer any more" in out


def test_top_ends_on_ctrl_c(
    server: MetricsServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", interrupt)
    code, _, err = run(capsys, "top", "--port", str(server.port))
    assert (code, err) == (0, "")


@pytest.mark.parametrize("interval", ["0", "-1s", "1h", "soon", "nan", "inf", "1ms", ""])
def test_what_is_no_interval(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "top", "--interval", interval)
    assert code == 2
    assert "--interval" in err and "'500ms'" in err


def test_doctor_live(
    server: MetricsServer, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--live", "--port", str(server.port), "--seconds", "50ms"]
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0, out
    rows = json.loads(out)
    names = {row["check"].rpartition(": ")[2] for row in rows}
    assert {"hit ratio", "migration rate", "queue depth", "speed", "host memory"} <= names
    assert all(bool(row["remedy"]) == (row["status"] in ("warn", "fail")) for row in rows)
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "hit ratio" in out


def test_doctor_live_fails_on_a_leak(
    server: MetricsServer, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = driver.manager.tiers.take_hot(driver.geometry)
    arguments = ["doctor", "--live", "--port", str(server.port), "--seconds", "50ms", "--json"]
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    (row,) = [row for row in json.loads(out) if row["status"] == "fail"]
    assert "lost blocks" in row["check"]
    assert lost is not None
    driver.manager.tiers.free(lost)
    assert run(capsys, *arguments)[0] == 0


def test_doctor_refuses_flags_of_live_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--port", "9464"), ("--host", "::1"), ("--seconds", "2s")):
        code, _, err = run(capsys, "doctor", flag, value)
        assert code == 2
        assert f"{flag} {value}: it belongs to --live" in err


def test_a_restarted_process_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = iter([1, 1, 2])
    monkeypatch.setattr(
        client,
        "fetch_page",
        lambda *_: read_page(
            json.dumps({"version": "1", "process": next(processes), "host_memory": 1})
        ),
    )
    code, _, err = run(capsys, "doctor", "--live", "--seconds", "50ms")
    assert code == 1 and "it was restarted" in err


@pytest.mark.checkpoint
def test_generate_serves_while_it_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    seen: list[str] = []
    generate = kvpass.generate

    def watched(*arguments: Any, **options: Any) -> Any:
        options["on_tokens"] = lambda *_: seen.append(client.fetch_metrics(port))
        return generate(*arguments, **options)

    monkeypatch.setattr(kvpass, "generate", watched)
    code, _, err = run(
        capsys, "generate", "--model", "smollm2-135m", "--prompt", "One two", "--inner", "eager",
        "--max-new-tokens", "2", "--hot", "16MiB", "--metrics-port", str(port),
    )  # fmt: skip
    assert code == 0, err
    assert f"metrics: http://127.0.0.1:{port}/metrics" in err
    assert len(seen) == 2 and "kvpass_tokens{" in seen[0]
    with pytest.raises(MetricsError):
        client.fetch(port)


@pytest.mark.parametrize("command", [["demo"], ["generate", "--model", "x", "--prompt", "y"]])
def test_a_bad_metrics_port_does_not_wait_for_the_model(
    command: list[str], server: MetricsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *command, "--metrics-port", "70000")
    assert code == 2 and "port = 70000" in err
    code, _, err = run(capsys, *command, "--metrics-port", str(server.port))
    assert code == 1 and "in use" in err
