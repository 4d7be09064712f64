"""Ranks that are forks end as programs do."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

# Makes the ranks of this module forks.
import torch  # noqa: F401

from tests.world import World


class ExitsWhenDestroyed:
    """Ends its process, with an exit code that nothing else has, when Python clears the module that holds it."""

    def __del__(self, leave: Any = os._exit) -> None:
        leave(23)


#: Of a rank: what it leaves behind.
left: list[object] = []


def leave(rank: int, code: int) -> None:
    sys.exit(code)


def leave_an_object(rank: int) -> None:
    left.append(ExitsWhenDestroyed())


def write_in_c(rank: int, folder: str) -> None:
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = libc.fopen(f"{folder}/{rank}".encode(), b"w")
    libc.fputs(b"written by C", ctypes.c_void_p(file))


@pytest.mark.parametrize("code", [0, 7])
def test_a_fork_ends_with_the_exit_code_that_it_chose(code: int) -> None:
    World(2, expect_exit={0: code, 1: code}).run(leave, code)


def test_a_fork_destroys_the_objects_in_its_modules_before_it_ends() -> None:
    World(2, expect_exit={0: 23, 1: 23}).run(leave_an_object)


def test_what_c_has_buffered_is_written_before_a_fork_ends(tmp_path: Path) -> None:
    World(2).run(write_in_c, str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["written by C"] * 2
