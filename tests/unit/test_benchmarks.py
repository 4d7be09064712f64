"""Every benchmark runs to its end in its shortest mode and checks its own results."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

#: Options of the benchmarks that start ranks.
RANKS = ("--limit", "120")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def quick(script: str, folder: Path, *options: str) -> tuple[str, list[dict[str, str]]]:
    """The output of the script, and the rows of its CSV files."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--csv", str(folder), *options]
    ours = ("BAGUA_", "MASTER_", "OMPI_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours) and key != "RANK"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stdout
    rows = []
    for path in folder.glob("*.csv"):
        with open(path, newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return done.stdout, rows


def test_collectives_are_compared_and_an_mpi_that_does_not_start_is_named(tmp_path: Path) -> None:
    broken = tmp_path / ".venv-mpi-mpich" / "bin"
    broken.mkdir(parents=True)
    for name in ("mpiexec", "python"):
        (broken / name).write_text("#!/bin/sh\nexit 3\n")
        (broken / name).chmod(0o755)
    peers = ("--peers", "gloo", "mpich", "openmpi", "--environments", str(tmp_path))
    shown, rows = quick("collectives.py", tmp_path, *RANKS, *peers, "--verbs", "all_reduce", "all_to_all")
    assert {row["contender"] for row in rows} == {"ours", "ours-arena", "gloo"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert {"machine", "date", "commit"} <= rows[0].keys()
    assert "no column for mpich: a rank or its launcher ended with 3 before it connected" in shown
    assert f"no column for openmpi: there is no {tmp_path}/.venv-mpi-openmpi/bin/mpiexec (make bench-mpi)" in shown


def test_mpis_are_compared_in_their_own_environments_and_the_best_one_is_named(tmp_path: Path) -> None:
    found = {name for name in ("impi", "mpich", "openmpi") if (BENCHMARKS.parent / f".venv-mpi-{name}").exists()}
    if not found:
        pytest.skip("there is no environment .venv-mpi-*: make bench-mpi")
    shown, rows = quick("collectives.py", tmp_path, *RANKS, "--peers", *found, "--verbs", "all_reduce", "all_to_all")
    assert {row["contender"] for row in rows} == {"ours", "ours-arena", *found}
    # The MPI standard has no bfloat16.
    assert {row["dtype"] for row in rows if row["contender"] in found} == {"float32"}
    table = [line.split() for line in shown.splitlines() if line.split()[2:3] == ["float32"]]
    assert len(table) == 3
    assert all(found & set(line) for line in table)


def test_placement_names_the_processors_of_every_batch_also_beside_gloo(tmp_path: Path) -> None:
    shown, rows = quick("collectives.py", tmp_path, *RANKS, "--placement", "--peers", "gloo")
    contenders = ["ours", "ours-arena", "gloo", "ours with gloo", "ours-arena with gloo"]
    found = [(row["bytes"], row["contender"], row["batch"]) for row in rows]
    assert found == [(size, name, str(n)) for size in ("1024", "1048576") for name in contenders for n in range(4)]
    assert all(float(row["us"]) > 0 and "rank 1 on " in row["processors"] for row in rows)
    assert shown.count("took more than 3 times the best") == 2 * len(contenders)


def test_ranks_may_meet_at_a_barrier_that_spins_instead_of_sleeping(tmp_path: Path) -> None:
    shown, rows = quick("collectives.py", tmp_path, *RANKS, "--barrier", "--peers", "--verbs", "all_reduce")
    assert "each batch begins at a barrier that spins" in shown
    assert all(float(row["seconds"]) > 0 and int(row["slow"]) >= 0 for row in rows)


def test_codecs_are_compared_with_a_copy_and_with_torch(tmp_path: Path) -> None:
    shown, rows = quick("codec.py", tmp_path)
    assert len(rows) == 3 + 2 * 7
    assert all(float(row["copy/time"]) > 0 for row in rows)
    assert [row["codec"] for row in rows if row["torch/time"]] == ["minmax_u8", "minmax_u8"]
    assert "codec,call,bytes,seconds,copy/time,torch/time" in shown


def test_the_overhead_of_a_verb_is_measured_at_every_layer(tmp_path: Path) -> None:
    _, rows = quick("overhead.py", tmp_path)
    layers = [row["call"] for row in rows if not row["ns_mean"]]
    assert len(layers) == 11
    # All but the empty one, also beside a busy thread.
    assert [row["call"] for row in rows if row["ns_mean"]] == [f"{name}, busy thread" for name in layers[1:]]
    assert all(float(row["ns_min"]) > 0 for row in rows)


def test_two_builds_are_compared_in_every_case_and_their_losses_are_equal(tmp_path: Path) -> None:
    import bagua

    sources = str(Path(bagua.__file__).parents[1])
    shown, rows = quick("compare.py", tmp_path, *RANKS, sources, sources)
    assert {row["case"].split()[0] for row in rows} == {
        *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "step", "handover")
    }
    assert all(0 < float(row["low"]) <= float(row["ratio"]) <= float(row["high"]) for row in rows)
    assert "losses" not in shown


def test_a_folder_without_a_built_extension_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--quick", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"there is no built extension in {tmp_path}/bagua" in done.stdout


def test_an_extension_for_the_tests_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    tmp_path.joinpath("bagua").mkdir()
    tmp_path.joinpath("bagua", "__init__.py").touch()
    tmp_path.joinpath("bagua", "engine.py").write_text("IS_OPTIMIZED = False")
    command = [sys.executable, str(BENCHMARKS / "overhead.py")]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}/bagua has the extension for the tests, which is not optimized: make setup\n"


def test_element_types_are_timed_on_ordinary_tensors_and_in_an_arena(tmp_path: Path) -> None:
    _, rows = quick("dtypes.py", tmp_path, "--limit", "120")
    cases = [(name, dtype) for name in ("ours", "ours-arena") for dtype in ("float32", "bfloat16", "float16")]
    assert [(row["contender"], row["dtype"]) for row in rows] == cases
    assert all(0 < float(row["min"]) <= float(row["p50"]) for row in rows)


def test_messages_are_timed_against_gloo(tmp_path: Path) -> None:
    _, rows = quick("messages.py", tmp_path, *RANKS)
    assert {row["what"] for row in rows} == {"latency", "crossing"}
    assert len(rows) == 10
    assert all(float(row["ratio"]) > 0 for row in rows)


def test_tls_is_timed_against_plain_tcp(tmp_path: Path) -> None:
    _, rows = quick("tls.py", tmp_path, "--sizes", "1KiB", "256KiB")
    assert [row["bytes"] for row in rows] == ["1024", "262144"]
    assert all(float(row["ratio"]) > 0 for row in rows)


def test_the_flight_recorder_is_timed_against_none(tmp_path: Path) -> None:
    _, rows = quick("recorder.py", tmp_path, *RANKS)
    assert [row["bytes"] for row in rows] == ["1024"]
    assert all(float(row[key]) > 0 for row in rows for key in ("recorded_ns", "unrecorded_ns", "ratio"))


def test_growth_counts_threads_and_time(tmp_path: Path) -> None:
    _, rows = quick("growth.py", tmp_path, *RANKS, "--peers", "gloo")
    assert {row["ranks"] for row in rows} == {"2"}
    assert all(int(row["threads"]) >= 0 for row in rows)


def test_many_light_ranks_join_and_stay(tmp_path: Path) -> None:
    _, rows = quick("joining.py", tmp_path)
    assert [row["ranks"] for row in rows] == ["4"]
    assert float(rows[0]["joined_s"]) > 0
    joined, reduced = map(int, rows[0]["descriptors"].split("+"))
    assert joined > 4
    assert reduced >= 0
    # One of them is killed, and all others name it, agree and go on.
    assert 0 < float(rows[0]["lost_s"]) < float(rows[0]["view_last_s"])
    assert 0 < float(rows[0]["view_first_s"]) <= float(rows[0]["view_last_s"])
    assert all(float(rows[0][key]) > 0 for key in ("messages", "kbytes", "view_cpu_s", "root_cpu_s"))


def test_the_network_is_measured_or_the_reason_is_printed(tmp_path: Path) -> None:
    shown, rows = quick("network.py", tmp_path, "--if-possible")
    if not rows:
        assert "nothing measured between network namespaces: " in shown
        pytest.skip(shown.strip())
    assert [row["rate"] for row in rows] == ["unlimited"]
    assert all(float(row[f"{name}_seconds"]) > 0 for row in rows for name in ("ours", "gloo", "bare"))


def test_accuracy_is_measured_after_each_epoch_or_the_reason_is_printed(tmp_path: Path) -> None:
    shown, rows = quick("accuracy.py", tmp_path, "--if-possible")
    if not rows:
        assert "nothing measured between network namespaces: " in shown
        pytest.skip(shown.strip())
    assert [(row["contender"], row["epoch"]) for row in rows] == [("ddp", "1"), ("bytegrad", "1")]
    # One in ten would be right by chance.
    assert all(float(row["accuracy"]) > 0.3 and float(row["seconds"]) > 0 for row in rows)


def test_training_is_compared_with_ddp_and_the_losses_agree(tmp_path: Path) -> None:
    _, rows = quick("train.py", tmp_path, *RANKS, "--parts", "throughput", "handover", "backend")
    assert {"bagua", "ddp", "ddp-bf16"} <= {row.get("contender", "") for row in rows}
    assert {"ddp on bagua", "ddp on gloo"} <= {row.get("contender", "") for row in rows}
    assert {"blocking", "handed over"} <= {row.get("what", "") for row in rows}


def test_averaging_is_measured_beside_a_slow_rank_and_plotted(tmp_path: Path) -> None:
    _, rows = quick("asynchronous.py", tmp_path, *RANKS)
    assert {row["contender"] for row in rows if row["part"] == "speed"} == {"alone", "async", "gradient_allreduce"}
    assert {row["contender"] for row in rows if row["part"] == "cost"} == {"alone", "async", "async aborted"}
    assert all(float(row["relative_speed"]) > 0 for row in rows)
    assert len(list(tmp_path.glob("*.png"))) == (find_spec("matplotlib") is not None)


def test_a_job_learns_although_a_rank_of_it_is_killed(tmp_path: Path) -> None:
    shown, rows = quick("kills.py", tmp_path, *RANKS)
    assert [(row["kills"], row["restarts"], row["equal"]) for row in rows] == [("1", "1", "True")], shown
    assert float(rows[0]["lowest"]) > 0.95


def test_the_cache_is_compared_with_redis_py_and_plotted(tmp_path: Path) -> None:
    for package in ("redis", "hiredis", "msgpack", "xxhash"):
        pytest.importorskip(package, reason=f"{package} is not installed: make setup")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: tools/system_packages test")
    _, rows = quick("cache.py", tmp_path)
    ratios = {row["way"]: row["of_decoded"] for row in rows if row["of_decoded"]}
    assert {"CacheLoader.get_many, arrays", "CacheLoader.get_many, tensors"} <= ratios.keys()
    assert all(float(ratio) > 0 for ratio in ratios.values())
    assert len(list(tmp_path.glob("*.svg"))) == (find_spec("matplotlib") is not None)


def test_samplers_are_compared_on_skewed_lengths(tmp_path: Path) -> None:
    _, rows = quick("samplers.py", tmp_path)
    assert {row["sampler"] for row in rows} == {"LoadBalancingDistributedSampler", "DistributedSampler"}


def test_fused_optimizers_are_measured_and_equal_the_plain_one(tmp_path: Path) -> None:
    _, rows = quick("fused_optimizer.py", tmp_path)
    assert {"plain", "foreach", "fused", "fuse_step"} <= {row["way"] for row in rows}
