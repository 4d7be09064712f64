"""`make cuda-breaks`: for each fault that the simulated driver can have, a test that notices."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.cuda.simulated import ROOT, built

COMPRESSED = "tests/cuda/test_compressed_on_device.py"
ORDER = "tests/cuda/test_verb_order.py"
BUCKETS = "tests/cuda/test_buckets_values.py"
FUTURES = "tests/cuda/test_torch_futures.py"

#: Fault, and tests that are run on such a driver, of which at least one has to fail.
BREAKS = (
    ("no-wait", ORDER),
    ("no-wait", "tests/cuda/test_buckets_order.py"),
    ("no-wait", "tests/cuda/test_cuda_training.py"),
    ("no-wait", "tests/cuda/test_averaging_on_devices.py"),
    # The others' world waits for a future that never completes, for two minutes.
    ("no-wait", f"{FUTURES}::test_other_work_of_the_default_stream_does_not_wait_for_a_future"),
    ("no-wait", "tests/cuda/test_comm_hooks.py"),
    ("eager-free", ORDER),
    ("eager-free", "tests/cuda/test_buckets_order.py"),
    ("short-copy", "tests/cuda/test_staged_values.py"),
    ("short-copy", "tests/cuda/test_buckets_values.py"),
    ("short-kernel", "tests/cuda/test_nccl_values.py"),
    ("short-kernel", "tests/cuda/test_codec_on_device.py"),
    ("short-kernel", "tests/cuda/test_compressed_on_device.py"),
    ("no-wait", "tests/cuda/test_compressed_on_device.py"),
    ("no-wait", "tests/cuda/test_buckets_values.py"),
    ("no-wait", f"{ORDER}::test_an_operation_begins_after_every_producer_of_its_arrays[nccl]"),
    ("no-wait", "tests/cuda/test_nccl_in_hosts.py"),
    ("no-wait", f"{COMPRESSED}::test_producers_come_before_and_the_stream_of_the_wait_after[nccl]"),
    ("short-kernel", f"{BUCKETS}::test_by_nccl_an_operation_has_the_bits_of_the_host_and_none_pass_through_it"),
)


def main() -> int:
    """Prints each fault with the first test that fails; 1 when there is none."""
    built()
    unnoticed = 0
    for kind, tests in BREAKS:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--exitfirst", "--tb=no", "-p", "no:cacheprovider", tests],
            cwd=ROOT,
            env=os.environ | {"BAGUA_SIM_BREAK": kind},
            capture_output=True,
            text=True,
            check=False,
        )
        failed = re.search(r"^FAILED (\S+)", ran.stdout, re.MULTILINE)
        unnoticed += failed is None
        print(f"{kind:<12} {failed[1] if failed else 'UNNOTICED'}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
