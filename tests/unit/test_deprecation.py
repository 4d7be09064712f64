"""What is going to be removed warns for two minor versions, and is removed then."""

from __future__ import annotations

import warnings

import pytest

from bagua import deprecation


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


@pytest.mark.parametrize("since", ["", "0.3", "v0.3.0", "0.3.0rc1"])
def test_a_mark_without_a_version_is_refused(since: str) -> None:
    with pytest.raises(ValueError, match=r"must be major\.minor\.patch; got"):
        deprecation.deprecated(since=since)
