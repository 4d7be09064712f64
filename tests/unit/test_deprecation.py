"""What is going to be removed warns for two minor versions, and is removed then."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest

import bagua
from bagua import deprecation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def none_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of this test are forgotten afterwards."""
    monkeypatch.setattr(deprecation, "_MARKED", [])


@pytest.mark.usefixtures("none_marked")
def test_a_deprecated_function_warns_at_the_line_of_its_caller_and_returns_its_result() -> None:
    @deprecation.deprecated(since="0.3.0", instead="bagua.all_reduce")
    def old(x: int, *, add: int = 0) -> int:
        """Adds."""
        return x + add

    with pytest.warns(
        DeprecationWarning,
        match=r"old is deprecated since Bagua 0\.3\.0 and will be removed in 0\.5\.0; use bagua.all_reduce",
    ) as found:
        assert old(1, add=2) == 3
    assert found[0].filename == __file__
    assert (old.__name__, old.__doc__) == ("old", "Adds.")


@pytest.mark.usefixtures("none_marked")
def test_a_deprecated_class_stays_a_class_and_warns_when_it_is_constructed() -> None:
    @deprecation.deprecated(since="1.2.3")
    class Old:
        def __init__(self, x: int) -> None:
            self.x = x

    with pytest.warns(
        DeprecationWarning, match=r"Old is deprecated since Bagua 1\.2\.3 and will be removed in 1\.4\.0$"
    ):
        old = Old(3)
    assert isinstance(old, Old)
    assert old.x == 3


@pytest.mark.usefixtures("none_marked")
def test_nothing_warns_before_it_is_called() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deprecation.deprecated(since="0.3.0")(lambda: None)


@pytest.mark.usefixtures("none_marked")
@pytest.mark.parametrize(
    ("version", "is_overdue"), [("0.3.0", False), ("0.4.9", False), ("0.5.0", True), ("1.0.0", True)]
)
def test_a_name_is_overdue_two_minor_versions_later(version: str, is_overdue: bool) -> None:
    deprecation.deprecated(since="0.3.0")(lambda: None)
    assert bool(deprecation.overdue(version)) == is_overdue


@pytest.mark.parametrize("since", ["", "0.3", "v0.3.0", "0.3.0rc1"])
def test_a_mark_without_a_version_is_refused(since: str) -> None:
    with pytest.raises(ValueError, match=r"must be major\.minor\.patch; got"):
        deprecation.deprecated(since=since)


@pytest.mark.slow
def test_nothing_that_this_version_should_have_removed_is_left() -> None:
    for module in re.findall(r"api/(bagua[\w.]*)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            # A module without its optional package has no user; one of our own that is missing is an error.
            if error.name is None or error.name.startswith("bagua"):
                raise
    assert deprecation.overdue(bagua.__version__) == []
