"""Draws the charts of the documentation from records: milliseconds of a step by algorithm and rate (bandwidth.py), and
accuracy over time by algorithm (accuracy.py).

.venv/bin/python benchmarks/chart.py
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "record" / "bandwidth-2026-11-22-a9c43cb.csv"
CHART = ROOT / "docs" / "images" / "bandwidth.svg"
ACCURACY = ROOT / "benchmarks" / "record" / "accuracy-2026-11-26-0fac69c.csv"
ACCURACY_CHART = ROOT / "docs" / "images" / "accuracy.svg"

#: What is shown, top to bottom: the contender of the record, and its label. The first three are torch's.
SHOWN = (
    ("ddp", "DDP, gloo"),
    ("ddp-bf16", "DDP, bf16 hook"),
    ("ddp-powersgd", "DDP, PowerSGD hook"),
    ("gradient_allreduce", "gradient_allreduce"),
    ("bytegrad", "bytegrad"),
    ("bytegrad-onebit", "bytegrad, onebit"),
    ("powersgd", "powersgd"),
    ("local_sgd", "local_sgd, 8 steps"),
    ("diloco", "diloco, 20 steps"),
)
TORCHS = 3
RATES = {"1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}

#: Colours by their use: in a light page, in a dark page.
COLOURS = {
    "page": ("#ffffff", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "rule": ("#d0d7de", "#30363d"),
    "theirs": ("#8c959f", "#7d8590"),
    "ours": ("#2563eb", "#60a5fa"),
    "encoded": ("#15803d", "#4ade80"),
    "seldom": ("#c2410c", "#fb923c"),
    "alone": ("#7e22ce", "#c084fc"),
}

#: The colour of each line of accuracy.py, and its style. The first two are torch's.
LINES = {
    "ddp": ("theirs", "-"),
    "ddp-bf16": ("theirs", "--"),
    "bytegrad": ("encoded", "-"),
    "bytegrad-onebit": ("encoded", "--"),
    "local_sgd": ("seldom", "-"),
    "async": ("alone", "-"),
}


def milliseconds(record: Path) -> dict[tuple[str, str], int]:
    """(rate, contender) -> milliseconds of a step, rounded."""
    with record.open(encoding="utf-8", newline="") as file:
        return {(row["rate"], row["contender"]): int(float(row["step_s"]) * 1000 + 0.5) for row in csv.DictReader(file)}


def prepared() -> Any:
    """matplotlib's pyplot, set up for text that a page can style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "bagua",
            "font.family": "sans-serif",
            "font.size": 11,
            **dict.fromkeys(("text.color", "xtick.color", "ytick.color", "axes.titlecolor"), COLOURS["ink"][0]),
        }
    )
    return pyplot


def draw(record: Path) -> str:
    """The chart of bandwidth.py as SVG, whose colours follow the reader's choice of light or dark pages."""
    pyplot = prepared()
    steps = milliseconds(record)
    figure, panels = pyplot.subplots(1, len(RATES), figsize=(9.2, 3.9), facecolor=COLOURS["page"][0], sharey=True)
    labels = [label for _, label in SHOWN]
    for panel, (rate, title) in zip(panels, RATES.items(), strict=True):
        values = [steps[rate, contender] for contender, _ in SHOWN]
        colours = [COLOURS["theirs" if place < TORCHS else "ours"][0] for place in range(len(SHOWN))]
        bars = panel.barh(labels, values, color=colours, height=0.7)
        panel.bar_label(bars, labels=[f"{value} ms" for value in values], padding=4, color=COLOURS["ink"][0])
        panel.set_title(title, loc="left", fontweight="bold", fontsize=12)
        panel.set_xlim(0, max(values) * 1.22)
        panel.set_facecolor(COLOURS["page"][0])
        panel.tick_params(length=0)
        panel.set_xticks([])
        panel.spines[:].set_visible(False)
        panel.axvline(0, color=COLOURS["rule"][0], linewidth=1)
    panels[0].invert_yaxis()
    figure.suptitle(
        "A training step, 25 million parameters, two hosts (grey: torch, blue: Bagua); shorter is better",
        x=0.012,
        ha="left",
        fontsize=12,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    return as_svg(pyplot, figure)


def curves(record: Path) -> dict[str, list[tuple[float, float]]]:
    """contender -> seconds of training and accuracy after each epoch."""
    found: dict[str, list[tuple[float, float]]] = {}
    with record.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["contender"], []).append((float(row["seconds"]), float(row["accuracy"])))
    return found


def draw_accuracy(record: Path) -> str:
    """The chart of accuracy.py: each line ends where its contender has trained all epochs."""
    pyplot = prepared()
    figure, panel = pyplot.subplots(figsize=(9.2, 4.2), facecolor=COLOURS["page"][0])
    measured = curves(record)
    for name, (colour, style) in LINES.items():
        seconds, accuracy = zip(*measured[name], strict=True)
        label = f"{name}: {seconds[-1]:.1f} s"
        panel.plot(seconds, accuracy, style, color=COLOURS[colour][0], linewidth=2, label=label)
    panel.legend(frameon=False, loc="lower right", labelcolor=COLOURS["ink"][0])
    panel.set_ylim(0.8, 1.0)
    panel.set_xlim(0, None)
    panel.set_yticks([0.8, 0.85, 0.9, 0.95, 1.0], ["80 %", "85 %", "90 %", "95 %", "100 %"])
    panel.set_facecolor(COLOURS["page"][0])
    panel.grid(axis="y", color=COLOURS["rule"][0], linewidth=1)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.set_xlabel("seconds of training", color=COLOURS["ink"][0])
    figure.suptitle(
        "Accuracy on the test images during 15 epochs, two hosts at 100 Mbit/s (grey: torch)",
        x=0.012,
        ha="left",
        fontsize=12,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    return as_svg(pyplot, figure)


def as_svg(pyplot: Any, figure: Any) -> str:
    """The figure as text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return themed(text.getvalue())


def themed(svg: str) -> str:
    """The same with variables in the place of colours, which a dark page gives other values."""
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    light, dark = ("".join(f"--{name}: {pair[which]};" for name, pair in COLOURS.items()) for which in (0, 1))
    style = f"<style>svg {{{light}}} @media (prefers-color-scheme: dark) {{svg {{{dark}}}}}</style>"
    svg = re.sub(r"<\?xml.*?(?=<svg)", "", svg, flags=re.DOTALL)
    return re.sub(r"(<svg[^>]*>)", rf"\1{style}", svg, count=1)


def main() -> None:
    """Writes the charts."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    CHART.write_text(draw(RECORD), encoding="utf-8")
    ACCURACY_CHART.write_text(draw_accuracy(ACCURACY), encoding="utf-8")


if __name__ == "__main__":
    main()
