"""Who listens on the line of a job with TLS finds no payload and nothing but TLS; without it, the payload."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed import listener
from tests.distributed.test_elastic import Job, Rank
from tests.distributed.test_network_namespaces import Hosts, hosts  # noqa: F401

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100.0
#: In namespaces of our own every port is free.
PORT, BOOK_PORT = 29500, 29741
PAYLOAD, SECRET = "what must not be on the line; ", "a secret that is not on the line"
TLS = {"BAGUA_TLS": "1", "BAGUA_JOB_SECRET": SECRET}


def recorded(
    hosts: Hosts,  # noqa: F811
    folder: Path,
    job: Callable[[Hosts, dict[str, str]], None],
    env: dict[str, str],
) -> list[bytes]:
    """Every stream of every connection of a job, as the first host's interfaces saw it."""
    path = folder / "recorded"
    command = [*hosts.inside(0), sys.executable, listener.__file__, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        job(hosts, env)
        process.communicate("\n", timeout=PATIENCE_S)
    return list(listener.streams(pickle.loads(path.read_bytes())).values())


def verbs(hosts: Hosts, env: dict[str, str]) -> None:  # noqa: F811
    """A plain job of three ranks: rendezvous, control connections, data streams, a sub-group."""
    ranks = []
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_")}
    for rank in range(3):
        host = 0 if rank < 2 else 1
        place = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(PORT), "BAGUA_TRANSPORT": "tcp"}
        script = str(Path(__file__).with_name("tls_rank_in_a_namespace.py"))
        command = [*hosts.inside(host), sys.executable, script, PAYLOAD]
        ranks.append(subprocess.Popen(command, env=clean | place | env, stdout=subprocess.PIPE, text=True, cwd=ROOT))
    hosts.ranks.extend(ranks)
    found = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert found[0].split() == ["self", *(["tls"] * 2 if "BAGUA_TLS" in env else ["tcp"] * 2)]


def elastic(hosts: Hosts, env: dict[str, str]) -> None:  # noqa: F811
    """An elastic job whose rank 1 is killed and comes back: book, join servers, averaging."""
    book = f"tcp://{hosts.addresses[0]}:{BOOK_PORT}"
    listen = [sys.executable, "-m", "bagua.distributed.store", "--listen", book.removeprefix("tcp://")]
    server = subprocess.Popen(
        [*hosts.inside(0), *listen], stdout=subprocess.PIPE, text=True, env=os.environ | env, cwd=ROOT
    )
    job = Job(2, book)

    def start(rank: int) -> Rank:
        made = Rank(rank, 2, book, hosts.namespace(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **env)
        job.ranks.append(made)
        return made

    try:
        assert server.stdout is not None
        assert server.stdout.readline().strip() == book
        ranks = [start(rank) for rank in range(2)]
        assert [rank.answer() for rank in ranks] == [{"rank": r, "rejoined": False} for r in range(2)]
        for rank in ranks:
            rank.send("wrap 1 4")
        assert [rank.answer() for rank in ranks] == ["wrapped"] * 2
        for rank in ranks:
            rank.is_in([0, 1])
        ranks[1].kill()
        ranks[0].is_in([0])
        again = start(1)
        assert again.answer() == {"rank": 1, "rejoined": True}
        assert again.ask("wrap 1 4") == "wrapped"
        for rank in (ranks[0], again):
            rank.is_in([0, 1])
    finally:
        job.end()
        server.kill()
        server.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "in_clear"),
    [
        # The payload, a hello, an address.
        (verbs, [PAYLOAD.encode() * 10, b"BGhello\n", b"BGad"]),
        # A hello of each kind, an entry of the book.
        (elastic, [b"BGhello\n", b'"server":', b'"incarnation":']),
    ],
)
def test_a_listener_finds_nothing_but_tls(
    hosts: Hosts,  # noqa: F811
    tmp_path: Path,
    job: Callable[[Hosts, dict[str, str]], None],
    in_clear: list[bytes],
) -> None:
    plain = recorded(hosts, tmp_path, job, {"BAGUA_JOB_SECRET": SECRET})
    for words in in_clear:
        assert any(words in stream for stream in plain), f"the listener does not record {words!r} without TLS"
    assert any(listener.not_tls(stream) for stream in plain)

    encrypted = recorded(hosts, tmp_path, job, TLS)
    assert len(encrypted) >= len(plain) // 2
    assert sum(map(len, encrypted)) > 1000
    for stream in encrypted:
        assert listener.not_tls(stream) is None, listener.not_tls(stream)
        for words in (*in_clear, SECRET.encode()):
            assert words not in stream
