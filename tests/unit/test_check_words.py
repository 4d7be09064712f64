"""`tools/check_words.py` finds figures of speech in prose and names, and leaves literal uses alone."""

from pathlib import Path

import pytest

from tools.check_words import Use, files, main, uses


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("# Nobody waits for it.", "Nobody"),
        ("a rank whose peer hears of it", "hears"),
        ("def test_a_rank_that_is_told_so() -> None:", "told"),
        ("A newcomer stands by.", "newcomer"),
        ("A joining rank stands at it.", "stands"),
        ("its door", "door"),
        ("`unsafe` lives in `memory/`", "lives"),
        ("no word from rank 0", "no word"),
        ("by another way than NCCL", "way"),
        ("// SAFETY: nobody else uses it.", "nobody"),
        ("fn both_ranks_hear_that_only_one_uses_tls() {", "hear"),
        ("class Place:", "Place"),
        ("class _Shared(Protocol):", "_Shared"),
        ("pub(super) struct Shared<G = Group> {", "Shared"),
        ("pub enum State {", "State"),
    ],
)
def test_a_figure_of_speech_is_found(line: str, word: str) -> None:
    (first, *_) = uses(f"\n{line}\n")
    assert (first.line, first.word) == (2, word)
    assert first.instead


@pytest.mark.parametrize(
    "line",
    [
        "position = file.tell()",
        "a process that lives for a second",
        "three ways to use it, in this way, both ways",
        "an address book, in place of the state_dict",
        "a word of 64 bits, word for word",
        "one-way loss",
        "understand, always, password, lifetime, indoor",
        "class ModelState(Record):",
        "the struct State of the C library, enum Place",
        "struct SharedArena(Mapping);",
    ],
)
def test_a_literal_use_is_none(line: str) -> None:
    assert list(uses(line)) == []


def test_every_use_has_its_line_and_an_advice() -> None:
    assert list(uses("He tells\nand tells.")) == [
        Use(1, "tells", "report, send, name, distinguish"),
        Use(2, "tells", "report, send, name, distinguish"),
    ]


def test_the_command_names_file_line_and_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tests/unit/test_check_words.py"]) == 1
    assert "tests/unit/test_check_words.py:13: Nobody: say which rank, thread or process" in capsys.readouterr().out
    assert main(["tools", "tests/typing"]) == 0
    assert capsys.readouterr().out == "words: ok\n"


def test_folders_are_read_without_the_lists_of_words() -> None:
    root = Path(__file__).parents[2]
    found = {file.relative_to(root).as_posix() for file in files(root, ["tools", "README.md", "rust/bagua-cuda"])}
    assert {"README.md", "tools/wheel.py", "rust/bagua-cuda/src/lib.rs", "rust/bagua-cuda/kernels/update.cu"} <= found
    assert "tools/check_words.py" not in found
