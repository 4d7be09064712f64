"""`bagua.metrics.progress` against a server that answers as Kubeflow Trainer's does, or not at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bagua import metrics
from bagua.lifecycle import process
from bagua.metrics import trainer
from tests.waits import until

DEADLINE_S = 30.0

NAMES = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")


class TrainerServer:
    """Keeps what is posted; answers with `status`."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.token = folder / "ca.crt", folder / "token"
        self.token.write_text("first\n")
        key = folder / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
                *("-days", "2", "-subj", "/CN=trainer", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(key), "-out", str(self.certificate)),
            ],
            check=True,
            capture_output=True,
        )
        self.status = 200
        # Cleared by a test that wants answers to wait.
        self.answers = threading.Event()
        self.answers.set()
        self.posts: list[tuple[str, str, dict[str, Any]]] = []
        self.came = threading.Condition()
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with ours.came:
                    ours.posts.append((self.path, self.headers["Authorization"], json.loads(body)))
                    ours.came.notify_all()
                ours.answers.wait(10 * DEADLINE_S)
                self.send_response(ours.status)
                if ours.status == 307:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.variables = dict(
            zip(
                NAMES,
                (f"https://127.0.0.1:{self.server.server_port}/status", str(self.certificate), str(self.token)),
                strict=True,
            )
        )

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        """The statuses, once there are `count`."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.posts) >= count, DEADLINE_S), self.posts
            return [body["trainerStatus"] for _, _, body in self.posts]

    def close(self) -> None:
        self.answers.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerServer]:
    if shutil.which("openssl") is None:
        pytest.skip("certificates need the program `openssl`")
    found = TrainerServer(tmp_path)
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(trainer, "_INTERVAL_S", 0.01)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    process.packages.pop(trainer._Reports, None)
    yield found
    found.close()
    reports = process.packages.pop(trainer._Reports, None)
    if reports is not None:
        # The exit of the tests has nothing to post.
        reports._due = None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_server_gets_percentage_time_and_metrics_as_strings(server: TrainerServer) -> None:
    metrics.progress(0, 200, loss=2.5, step=np.int64(3), phase="warm-up", good=True, lr=np.array(0.5, dtype=np.float32))
    server.wait_for(1)
    metrics.progress(199, 200)
    first, second = server.wait_for(2)
    assert first.pop("lastUpdatedTime").endswith("Z")
    assert first == {
        "progressPercentage": 0,
        "metrics": [
            {"name": "loss", "value": "2.5"},
            {"name": "step", "value": "3.0"},
            {"name": "phase", "value": "warm-up"},
            {"name": "good", "value": "True"},
            {"name": "lr", "value": "0.5"},
        ],
    }
    assert second["progressPercentage"] == 99
    assert second["estimatedRemainingSeconds"] >= 1
    assert "metrics" not in second
    metrics.progress(200, 200)
    assert server.wait_for(3)[2] | {"lastUpdatedTime": ""} == {
        "progressPercentage": 100,
        "estimatedRemainingSeconds": 0,
        "lastUpdatedTime": "",
    }
    assert {path for path, _, _ in server.posts} == {"/status"}


def test_the_time_is_estimated_from_the_pace_since_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    reports = trainer._Reports()
    assert reports._remaining(10, 100) is None
    clock[0] = 120.0
    # 20 s for 20 of them, and 70 are left.
    assert reports._remaining(30, 100) == 70
    # Another total, or fewer than before, is another training.
    assert reports._remaining(30, 1000) is None
    clock[0] = 130.0
    assert reports._remaining(20, 1000) is None
    clock[0] = 1e9
    assert reports._remaining(21, 1000) == 2**31 - 1


def test_a_token_that_is_replaced_is_used(server: TrainerServer) -> None:
    metrics.progress(1, 10)
    server.wait_for(1)
    server.token.write_text("second")
    metrics.progress(2, 10)
    server.wait_for(2)
    assert [token for _, token, _ in server.posts] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("status", [500, 403, 307])
def test_a_server_that_answers_with_an_error_costs_one_warning(
    status: int, server: TrainerServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.status = status
    for done in range(1, 4):
        metrics.progress(done, 10)
        server.wait_for(done)
    until(lambda: warnings_of(caplog) != [])
    # It is asked again, and works again.
    server.status = 200
    metrics.progress(4, 10)
    server.wait_for(4)
    (warning,) = warnings_of(caplog)
    assert f"answered with status {status}; there is no further warning" in warning
    assert "first" not in warning
    # A redirection is not followed: the token is for one server.
    assert {path for path, _, _ in server.posts} == {"/status"}


def test_a_server_that_is_gone_costs_one_warning_and_no_wait(
    server: TrainerServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bound and not listening: refused, and no other process gets the port.
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv(NAMES[0], f"https://127.0.0.1:{reserved.getsockname()[1]}/status")
        metrics.progress(1, 10)
        until(lambda: warnings_of(caplog) != [])
        metrics.progress(2, 10)
        reports = process.packages[trainer._Reports]
        until(lambda: reports._due is None and not reports._posting)
    (warning,) = warnings_of(caplog)
    assert "Connection refused" in warning


def test_no_call_waits_for_a_server_that_does_not_answer(server: TrainerServer) -> None:
    server.answers.clear()
    metrics.progress(0, 1000)
    server.wait_for(1)
    # Each of them would wait for the answer, which comes only afterwards.
    for done in range(1, 1000):
        metrics.progress(done, 1000)
    assert len(server.posts) == 1
    server.answers.set()
    # Those between are left out.
    assert [status["progressPercentage"] for status in server.wait_for(2)] == [0, 99]


def test_posts_are_an_interval_apart_but_for_the_last(server: TrainerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_INTERVAL_S", 1000.0)
    metrics.progress(0, 10)
    server.wait_for(1)
    for done in range(1, 10):
        metrics.progress(done, 10)
    metrics.progress(10, 10)
    assert [status["progressPercentage"] for status in server.wait_for(2)] == [0, 100]
    reports = process.packages[trainer._Reports]
    until(lambda: not reports._posting)
    metrics.progress(10, 10)
    assert reports._due is not None
    assert not reports._at_once


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({NAMES[0]: "http://127.0.0.1:9/status"}, "does not begin with https://"),
        ({NAMES[1]: ""}, f"{NAMES[1]} not set"),
        ({NAMES[2]: ""}, f"{NAMES[2]} not set"),
        ({NAMES[2]: "/no/such/token"}, "/no/such/token"),
        ({NAMES[1]: "/no/such/certificate"}, "No such file"),
    ],
)
def test_variables_that_cannot_be_used_cost_one_warning(
    change: dict[str, str],
    complaint: str,
    server: TrainerServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    metrics.progress(1, 10)
    until(lambda: warnings_of(caplog) != [])
    assert complaint in warnings_of(caplog)[0]
    assert server.posts == []


def test_a_server_with_another_certificate_does_not_get_the_token(
    server: TrainerServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    another = TrainerServer(other)
    another.close()
    monkeypatch.setenv(NAMES[1], str(another.certificate))
    metrics.progress(1, 10)
    until(lambda: warnings_of(caplog) != [])
    assert "CERTIFICATE_VERIFY_FAILED" in warnings_of(caplog)[0]
    assert server.posts == []


def test_another_rank_posts_nothing(server: TrainerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    metrics.progress(1, 10, loss=object())
    assert trainer._Reports not in process.packages
    assert server.posts == []


def test_without_the_variables_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAMES[0], raising=False)
    process.packages.pop(trainer._Reports, None)
    metrics.progress(1, 10, loss=object())
    assert trainer._Reports not in process.packages


@pytest.mark.parametrize(("done", "total"), [(-1, 10), (11, 10), (0, 0), (1, float("inf")), (float("nan"), 10)])
def test_numbers_that_are_no_progress_are_refused_everywhere(done: float, total: float) -> None:
    with pytest.raises(ValueError, match="it must be from 0 to a total above 0"):
        metrics.progress(done, total)


def test_a_metric_that_is_none_is_refused(server: TrainerServer) -> None:
    with pytest.raises(TypeError, match="metric 'loss' is neither a number nor a string"):
        metrics.progress(1, 10, loss=object())
    with pytest.raises(ValueError, match="metric 'phase' is an empty string"):
        metrics.progress(1, 10, phase="")


ENDS = """
import sys
from bagua import metrics
from bagua.metrics import trainer
trainer._EXIT_S = float(sys.argv[2]) or trainer._EXIT_S
metrics.progress(0, 10)
if sys.argv[1] == "done":
    metrics.progress(10, 10)
"""


@pytest.mark.parametrize(("how", "last"), [("done", 100), ("not done", 0)])
def test_the_exit_of_the_process_waits_for_the_last_post(how: str, last: int, server: TrainerServer) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    # Longer than that of a job: a busy machine takes a while for two posts.
    subprocess.run([sys.executable, "-c", ENDS, how, str(DEADLINE_S)], check=True, timeout=2 * DEADLINE_S, env=env)
    assert server.wait_for(1)[-1]["progressPercentage"] == last


def test_the_exit_of_the_process_does_not_wait_for_a_server_that_hangs(server: TrainerServer) -> None:
    # It answers when the test is over.
    server.answers.clear()
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", ENDS, "done", "0"], check=True, timeout=2 * DEADLINE_S, env=env)
    assert server.wait_for(1)


def test_a_forked_child_does_not_wait_for_its_parents_thread(server: TrainerServer) -> None:
    server.answers.clear()
    metrics.progress(0, 10)
    server.wait_for(1)
    child = os.fork()
    if child == 0:
        reports = process.packages[trainer._Reports]
        reports._finish()
        os._exit(0 if reports._thread is None else 1)
    assert os.waitpid(child, 0)[1] == 0
