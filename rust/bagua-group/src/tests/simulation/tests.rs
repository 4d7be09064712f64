//! Worlds of 64 to 256 ranks, and several seeds.

use super::*;

const SIZES: [usize; 4] = [64, 100, 200, 256];

/// Runs with these seeds, checked for what all scenarios must show.
fn runs(scenario: Scenario, ranks: usize, seeds: u64) -> impl Iterator<Item = Report> {
    (1..=seeds).map(move |seed| {
        let report = run(scenario, ranks, seed);
        let of = format!("{scenario:?}, {ranks} ranks, seed {seed}: {report:?}");
        assert_eq!(report.unfinished, 0, "a hang; {of}");
        assert_eq!((report.wrong, report.missing), (0, 0), "names; {of}");
        assert!(report.different <= 1, "a split view; {of}");
        assert_eq!(report.refused > 0, scenario == Scenario::Cut, "{of}");
        assert!(report.connections.worst as u32 <= 2 * ranks.next_power_of_two().ilog2(), "{of}");
        report
    })
}

#[test]
fn all_ranks_join_and_each_handles_few_messages_but_rank_0_one_for_each() {
    for ranks in SIZES {
        for report in runs(Scenario::NoFault, ranks, 3) {
            assert!(report.joined.is_some() && report.known.is_none() && report.different == 0);
            assert!(report.joining.mean < 8.0 && report.joining.worst < ranks as f64 + 32.0);
        }
    }
}

#[test]
fn after_a_kill_all_know_within_milliseconds_by_log_n_messages_each_and_are_in_one_view() {
    for ranks in SIZES {
        let log = f64::from(ranks.next_power_of_two().ilog2());
        for report in runs(Scenario::Kill, ranks, 5) {
            assert!(report.known < Some(0.002) && report.view < Some(0.02) && report.different == 1, "{report:?}");
            assert!(report.losses.worst <= 2.0 * log, "{report:?}");
        }
    }
}

#[test]
fn ranks_that_die_at_once_are_all_named_and_left_out() {
    for report in runs(Scenario::KillPercent, 256, 5).chain(runs(Scenario::KillPercent, 200, 5)) {
        assert!(report.known < Some(0.005) && report.view.is_some());
    }
    // The leader handles the messages of each rank about two or three views, not about one for each that died.
    for report in runs(Scenario::KillPercent, 1024, 1) {
        assert!(report.view < Some(0.1) && report.views.worst < 4.0 * 1024.0, "{report:?}");
    }
}

#[test]
fn when_the_leader_and_a_rank_that_passes_its_messages_on_die_during_the_agreement_the_others_are_in_one_view() {
    for ranks in SIZES {
        for report in runs(Scenario::KillAgreeing, ranks, 20) {
            assert!(report.view < Some(0.1) && report.different == 1, "{report:?}");
        }
    }
}

#[test]
fn slow_ranks_are_not_named_and_no_view_waits_for_a_reminder() {
    for ranks in SIZES {
        for report in runs(Scenario::Slow, ranks, 10) {
            assert!(report.known < Some(0.01) && report.view < Some(0.5), "{report:?}");
        }
    }
}

#[test]
fn lost_messages_delay_joining_and_views_and_change_no_name() {
    for ranks in SIZES {
        for report in runs(Scenario::Loss, ranks, 5) {
            assert!(report.joined < Some(3.0) && report.view < Some(5.0), "{report:?}");
        }
    }
}

#[test]
fn a_rank_that_dies_while_joining_is_named_by_all_within_the_heartbeat_timeout() {
    for scenario in [Scenario::KillRootJoining, Scenario::KillInnerJoining] {
        for ranks in SIZES {
            for report in runs(scenario, ranks, 10) {
                assert!(report.known < Some(5.0), "{report:?}");
            }
        }
    }
}

#[test]
fn a_frozen_rank_is_named_by_all_within_1_2_heartbeat_timeouts_and_no_view_waits_for_a_reminder() {
    for ranks in SIZES {
        for report in runs(Scenario::Freeze, ranks, 10) {
            let known = report.known.expect("all know");
            assert!((5.0..6.1).contains(&known) && report.view < Some(known + 0.1), "{report:?}");
        }
    }
}

#[test]
fn of_two_halves_one_goes_on_and_each_names_the_other() {
    for ranks in [64, 100] {
        for report in runs(Scenario::Cut, ranks, 3) {
            assert_eq!((report.different, report.refused), (1, ranks - ranks / 2), "{report:?}");
            assert!(report.known < Some(11.0), "{report:?}");
            // Each name comes over each connection; no rank gets those of all others by new ones.
            let log = f64::from(ranks.next_power_of_two().ilog2());
            assert!(report.losses.worst < 2.0 * log * ranks as f64, "{report:?}");
        }
    }
}

#[test]
fn a_run_is_determined_by_its_seed() {
    assert_eq!(run(Scenario::Slow, 64, 7), run(Scenario::Slow, 64, 7));
    assert_ne!(run(Scenario::Slow, 64, 7), run(Scenario::Slow, 64, 8));
}
