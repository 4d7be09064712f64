"""Groups of old versions of torch are kept until their threads have released their tensors."""

from __future__ import annotations

import types
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from bagua.torch_api.membership import torch_destroy_process_group  # noqa: E402


class Group:
    pass


@pytest.mark.parametrize(("version", "alive"), [("2.5.1+cu124", [True]), ("2.6.0", []), ("2.15.0a0+git", [])])
def test_a_group_outlives_its_destruction_where_torch_needs_it(
    monkeypatch: pytest.MonkeyPatch, version: str, alive: list[bool]
) -> None:
    world = types.SimpleNamespace(pg_map={Group(): "gloo"})
    group = weakref.ref(next(iter(world.pg_map)))
    destroyed: list[Any] = []
    seen: list[bool] = []

    def destroy(which: Any) -> None:
        destroyed.append(which)
        world.pg_map.clear()

    def sleep(seconds: float) -> None:
        assert seconds > 0
        seen.append(group() is not None)

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch_destroy_process_group, "_world", world)
    monkeypatch.setattr(torch_destroy_process_group, "destroy_process_group", destroy)
    monkeypatch.setattr(torch_destroy_process_group, "time", types.SimpleNamespace(sleep=sleep))
    torch_destroy_process_group.destroy()
    assert (destroyed, seen) == ([None], alive)
    assert group() is None
