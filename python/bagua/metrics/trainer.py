"""Progress of a training for Kubeflow Trainer, which shows it in the status of the TrainJob.

Trainer 2.2 and newer, with its feature gate `TrainJobStatus`, gives each container KUBEFLOW_TRAINER_SERVER_URL, an
https address, and the paths KUBEFLOW_TRAINER_SERVER_CA_CERT and KUBEFLOW_TRAINER_SERVER_TOKEN. The token is replaced
while the job runs, so it is read for each post. Source of the format: Trainer's proposal KEP-2779, "Track TrainJob
progress and expose training metrics", and its guide "TrainJob Progress and Training Metrics", which also asks for 5 s
between two posts.
"""

from __future__ import annotations

import datetime
import http.client
import json
import logging
import math
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bagua import config, launcher, lifecycle
from bagua.lifecycle import Record
from bagua.metrics.probes import joined

__all__ = ["progress"]

_log = logging.getLogger(__name__)

_URL, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))

#: Seconds between two posts, as Trainer's guide asks for.
_INTERVAL_S = 5.0

#: Seconds until a server that does not answer has failed.
_TIMEOUT_S = 5.0

#: Seconds for which the exit of the process waits for a post that is due, unless one has failed before.
_EXIT_S = 1.0

#: Largest value of `estimatedRemainingSeconds`, an int32.
_MOST = 2**31 - 1


def progress(done: float, total: float, **metrics: Any) -> None:
    """Reports to Kubeflow Trainer that `done` of `total` (steps, epochs, samples) are done.

    Where Trainer has set its variables, rank 0 posts `progressPercentage` (rounded down), `estimatedRemainingSeconds`
    (from the pace since the first call; not in the first post) and the metrics, as strings: numbers, strings, and
    everything that `float()` takes, such as arrays of shape (). All other ranks, and jobs elsewhere, do nothing. May
    be called in every step: a thread posts the newest values, at most every 5 s, and the first with `done == total` at
    once.

    A server that fails, or variables that cannot be used, cost one warning in the log, and no step waits for them. The
    exit of the process waits up to 1 s for the last post, and not at all after a failure.

    ValueError unless 0 <= done <= total and total > 0, on every rank and everywhere; TypeError or ValueError for a
    metric that is neither a number nor a string, or an empty one, where it would be posted.
    """
    if not (math.isfinite(done) and math.isfinite(total) and total > 0 and 0 <= done <= total):
        raise ValueError(f"progress is {done} of {total}; it must be from 0 to a total above 0")
    if config.text(_URL) is None or _rank() != 0:
        return
    shown = [{"name": name, "value": _text(name, value)} for name, value in metrics.items()]
    lifecycle.record(_Reports).post(done, total, shown)


def _rank() -> int:
    group = joined()
    return int(group.rank) if group is not None else launcher.found().rank or 0


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"metric {name!r} is an empty string")
        return value
    if isinstance(value, (bool, int, float)):
        return str(value)
    try:
        return str(float(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is neither a number nor a string: {error}") from None


class _Reports(Record):
    """The posts of this process."""

    def __init__(self) -> None:
        self._begin()
        lifecycle.at_exit(self._finish)

    def _begin(self) -> None:
        # Guards all below, and is notified when `_due` or `_posting` changes.
        self._changed = threading.Condition()
        # The newest status that has not been posted, and whether it is to be posted at once.
        self._due: dict[str, Any] | None = None
        self._at_once = False
        # Whether the last call had `done == total`.
        self._is_done = False
        # Whether the thread is in a post.
        self._posting = False
        self._thread: threading.Thread | None = None
        # When and where the pace is measured from; None before the first call.
        self._from: tuple[float, float, float] | None = None
        # Whether a post has failed, of which one warning was given.
        self._failed = False

    def after_fork_in_child(self) -> None:
        """The thread is the parent's, and may have held the lock."""
        self._begin()

    def post(self, done: float, total: float, metrics: list[dict[str, str]]) -> None:
        """Leaves a status to the thread."""
        is_done = done == total
        status: dict[str, Any] = {"progressPercentage": 100 if is_done else min(99, math.floor(100 * done / total))}
        with self._changed:
            remaining = self._remaining(done, total)
            if remaining is not None:
                status["estimatedRemainingSeconds"] = remaining
            if metrics:
                status["metrics"] = metrics
            status["lastUpdatedTime"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._due, self._at_once = status, self._at_once or (is_done and not self._is_done)
            self._is_done = is_done
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bagua-progress", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _remaining(self, done: float, total: float) -> int | None:
        """Seconds until `total`, by the pace since the first call of this total; None while there is none."""
        now = time.monotonic()
        if self._from is None or self._from[2] != total or done < self._from[1]:
            self._from = (now, done, total)
        began, at, _ = self._from
        if done == total:
            return 0
        return min(_MOST, math.ceil((total - done) * (now - began) / (done - at))) if done > at else None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due is not None)
                status, self._due, self._at_once, self._posting = self._due, None, False, True
            try:
                _send(status)
            # A defect here must not be the end of the thread either.
            except Exception as error:
                self._warn(error)
            with self._changed:
                self._posting = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._due is not None and self._at_once, _INTERVAL_S)

    def _warn(self, error: Exception) -> None:
        with self._changed:
            again, self._failed = self._failed, True
        if not again:
            what = "progress is not shown by Kubeflow Trainer: %s: %s; there is no further warning"
            _log.warning(what, type(error).__name__, error)

    def _finish(self) -> None:
        with self._changed:
            if self._thread is not None and not self._failed:
                self._at_once = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._failed or (self._due is None and not self._posting), _EXIT_S)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The token is for one server."""

    def redirect_request(self, *_: Any) -> None:
        """Makes a redirection an error."""


def _send(status: dict[str, Any] | None) -> None:
    """Posts one status. OSError, HTTPException or ValueError where that fails."""
    values = {name: config.text(name) for name in (_URL, _CA, _TOKEN)}
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"{' and '.join(missing)} not set")
    url, ca, token = (str(values[name]) for name in (_URL, _CA, _TOKEN))
    if not url.startswith("https://"):
        raise ValueError(f"{_URL}={url!r} does not begin with https://")
    request = urllib.request.Request(
        url,
        data=json.dumps({"trainerStatus": status}).encode(),
        headers={"Authorization": f"Bearer {Path(token).read_text().strip()}", "Content-Type": "application/json"},
    )
    # Made anew each time, because the certificate is replaced too. The server is in the cluster: no proxy.
    secure = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects(), secure)
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise http.client.HTTPException(f"{url} answered with status {error.code}") from None
