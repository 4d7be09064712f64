//! Joining, losses and views of 64 to 10,240 ranks: the state machines of the control plane over a simulated network and clock.
//!
//! Shown per number of ranks are the mean over the ranks and the rank with most; below, how each figure grows from the smallest world to the
//! largest, beside log2 n. Every run is checked: each rank has the right names, none else, and all that go on are in one view. What the
//! model is and what it leaves out is written in `bagua_group::simulation`.
//!
//! `cargo bench -p bagua-bench --bench scale -- [--ranks N,N…] [--seed S] [--json FILE] [--only NAME]`, the last of which chooses a
//! scenario and may be repeated.

use std::fmt::Write as _;
use std::time::Instant;

use bagua_group::simulation::{PerRank, Report, Scenario, run};

/// A column of the table: its title, its unit as a divisor and the name in a record, and the figure.
struct Column {
    title: &'static str,
    unit: f64,
    name: &'static str,
    figure: fn(&Report) -> Option<f64>,
}

const fn column(title: &'static str, unit: f64, name: &'static str, figure: fn(&Report) -> Option<f64>) -> Column {
    Column { title, unit, name, figure }
}

const MS: f64 = 1e-3;
const KB: f64 = 1e3;

/// The figures. A mean is followed by that of the worst rank.
const COLUMNS: [Column; 21] = [
    column("conns", 1.0, "connections_mean", |r| Some(r.connections.mean)),
    column("worst", 1.0, "connections_worst", |r| Some(r.connections.worst)),
    column("join ms", MS, "joined_s", |r| r.joined),
    column("msgs", 1.0, "joining_messages_mean", |r| if_any(r.joining.messages, false)),
    column("worst", 1.0, "joining_messages_worst", |r| if_any(r.joining.messages, true)),
    column("kB", KB, "joining_bytes_mean", |r| if_any(r.joining.bytes, false)),
    column("worst", KB, "joining_bytes_worst", |r| if_any(r.joining.bytes, true)),
    column("known ms", MS, "known_s", |r| r.known),
    column("msgs", 1.0, "loss_messages_mean", |r| if_any(r.losses.messages, false)),
    column("worst", 1.0, "loss_messages_worst", |r| if_any(r.losses.messages, true)),
    column("kB", KB, "loss_bytes_mean", |r| if_any(r.losses.bytes, false)),
    column("worst", KB, "loss_bytes_worst", |r| if_any(r.losses.bytes, true)),
    column("agreed ms", MS, "agreed_s", |r| r.agreed),
    column("view ms", MS, "view_s", |r| r.view),
    column("msgs", 1.0, "view_messages_mean", |r| if_any(r.views.messages, false)),
    column("worst", 1.0, "view_messages_worst", |r| if_any(r.views.messages, true)),
    column("kB", KB, "view_bytes_mean", |r| if_any(r.views.bytes, false)),
    column("worst", KB, "view_bytes_worst", |r| if_any(r.views.bytes, true)),
    column("wrong", 1.0, "wrong_names", |r| Some(r.wrong as f64)),
    column("missing", 1.0, "missing_names", |r| Some(r.missing as f64)),
    column("views", 1.0, "different_views", |r| Some(r.different as f64)),
];

fn if_any(figure: PerRank, worst: bool) -> Option<f64> {
    (figure.worst > 0.0).then_some(if worst { figure.worst } else { figure.mean })
}

/// Three digits.
fn short(value: f64) -> String {
    if value == 0.0 || value >= 100.0 || value.fract() == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.*}", if value < 10.0 { 2 } else { 1 })
    }
}

fn print_row(first: &str, cells: impl Iterator<Item = String>) {
    let cells: String = cells.map(|cell| format!("{cell:>10}")).collect();
    println!("{first:>8}{cells}");
}

/// What a run must show: the right names, no split view, and an end.
fn check(report: &Report) {
    let Report { scenario, ranks, wrong, missing, different, unfinished, .. } = report;
    let views = usize::from(report.view.is_some());
    assert!(
        (*wrong, *missing, *unfinished) == (0, 0, 0) && *different == views,
        "{scenario}, {ranks} ranks: {wrong} wrong names, {missing} missing, {different} views, {unfinished} unfinished"
    );
}

fn json(report: &Report, seed: u64) -> String {
    let Report { scenario, ranks, gave_up, refused, .. } = report;
    let mut row = format!("{{\"scenario\": \"{scenario}\", \"ranks\": {ranks}, \"seed\": {seed}");
    for Column { name, figure, .. } in &COLUMNS {
        let value = figure(report).map_or("null".to_owned(), |value| value.to_string());
        let _ = write!(row, ", \"{name}\": {value}");
    }
    let _ = write!(row, ", \"gave_up\": {gave_up}, \"refused\": {refused}}}");
    row
}

/// How the figures grow from the first report to the last.
fn print_growth(first: &Report, last: &Report) {
    let ratios = COLUMNS.iter().map(|column| match ((column.figure)(first), (column.figure)(last)) {
        (Some(a), Some(b)) if a > 0.0 => format!("x{}", short(b / a)),
        _ => String::new(),
    });
    print_row("growth", ratios);
}

fn main() {
    if bagua_bench::listed("scale") {
        return;
    }
    let (mut sizes, mut seed, mut file, mut only) = (vec![64, 256, 1024, 4096, 10_240], 1, None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--ranks" => {
                let list = arguments.next().expect("numbers of ranks");
                sizes = list.split(',').map(|size| size.parse().expect("a number of ranks")).collect();
            }
            "--seed" => seed = arguments.next().and_then(|word| word.parse().ok()).expect("a seed"),
            "--json" => file = Some(arguments.next().expect("the name of a file")),
            "--only" => {
                let name = arguments.next().expect("the name of a scenario");
                let known = Scenario::ALL.into_iter().find(|scenario| scenario.to_string() == name);
                only.push(known.unwrap_or_else(|| panic!("no scenario {name:?}")));
            }
            // What cargo adds.
            "--bench" => {}
            other => panic!("unknown option {other:?}"),
        }
    }
    let mut rows = String::new();
    for scenario in Scenario::ALL.into_iter().filter(|scenario| only.is_empty() || only.contains(scenario)) {
        println!("{scenario}");
        print_row("ranks", COLUMNS.iter().map(|column| column.title.to_owned()));
        let mut reports = Vec::new();
        for ranks in sizes.iter().copied().filter(|ranks| *ranks <= scenario.most_ranks()) {
            let begun = Instant::now();
            let report = run(scenario, ranks, seed);
            let cells = COLUMNS
                .iter()
                .map(|column| (column.figure)(&report).map_or("-".to_owned(), |value| short(value / column.unit)));
            print_row(&ranks.to_string(), cells);
            let millions = report.events as f64 / 1e6;
            eprintln!("         {millions:.2} million events in {:.1} s", begun.elapsed().as_secs_f64());
            check(&report);
            rows += &(json(&report, seed) + "\n");
            // After each run: the largest take minutes.
            if let Some(file) = &file {
                std::fs::write(file, &rows).unwrap_or_else(|error| panic!("{file}: {error}"));
            }
            reports.push(report);
        }
        if let [first, .., last] = &reports[..] {
            print_growth(first, last);
            let by = (last.ranks as f64).log2() / (first.ranks as f64).log2();
            println!("{:>8} log2 n: x{}, n: x{}", "", short(by), short(last.ranks as f64 / first.ranks as f64));
        }
        println!();
    }
}
