//! Ranks and the lines between them, on which messages travel in any order.

use super::super::super::views::Endpoint;
use super::*;

/// Connections that carry messages in order, by (from, to).
struct Lines {
    ranks: Vec<Overlay>,
    lines: BTreeMap<(usize, usize), VecDeque<Message>>,
    /// By rank: the notices and messages that it has got, in order.
    got: Vec<Vec<Action>>,
    sent: usize,
    random: u64,
}

impl Lines {
    fn new(size: usize, full: usize) -> Lines {
        let ranks: Vec<Overlay> = (0..size).map(|rank| Overlay::new(rank, size, full)).collect();
        let got = vec![Vec::new(); size];
        let mut all = Lines { ranks, lines: BTreeMap::new(), got, sent: 0, random: 0x9e37_79b9_7f4a_7c15 };
        for rank in 0..size {
            all.ranks[rank].neighbours().into_iter().filter(|other| *other < rank).for_each(|o| all.connect(rank, o));
        }
        all
    }

    fn connect(&mut self, a: usize, b: usize) {
        for (own, other) in [(a, b), (b, a)] {
            self.lines.insert((own, other), VecDeque::new());
            self.event(own, |overlay, out| assert!(overlay.link_up(other, out)));
        }
    }

    fn event(&mut self, rank: usize, event: impl FnOnce(&mut Overlay, &mut Vec<Action>)) {
        let mut out = Vec::new();
        event(&mut self.ranks[rank], &mut out);
        for action in out {
            match action {
                Action::Send(to, message) => {
                    for to in to {
                        self.sent += 1;
                        if let Some(line) = self.lines.get_mut(&(rank, to)) {
                            line.push_back(message.clone());
                        }
                    }
                }
                other => self.got[rank].push(other),
            }
        }
    }

    /// Delivers a message on a random line; false when there is none.
    fn step(&mut self) -> bool {
        let full: Vec<(usize, usize)> =
            self.lines.iter().filter(|(_, line)| !line.is_empty()).map(|(pair, _)| *pair).collect();
        // Marsaglia's xorshift64.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let Some((from, to)) = full.get((self.random >> 16) as usize % full.len().max(1)).copied() else {
            return false;
        };
        let message = self.lines.get_mut(&(from, to)).and_then(VecDeque::pop_front).unwrap();
        self.event(to, |overlay, out| match message {
            Message::Notice(notice) => overlay.received_notice(from, notice, out),
            Message::Routed(routed) => overlay.received_routed(routed, out),
            other => panic!("{other:?}"),
        });
        true
    }

    fn settle(&mut self) {
        while self.step() {}
    }

    /// A rank ends; each connected one notices.
    fn kill(&mut self, rank: usize) {
        let linked: Vec<usize> = self.ranks[rank].links().iter().copied().collect();
        self.lines.retain(|(from, to), _| *from != rank && *to != rank);
        linked.into_iter().for_each(|other| {
            self.event(other, |overlay, out| overlay.link_down(rank, true, "end of stream", out));
        });
    }
}

fn failed(group: u64) -> Notice {
    Notice::Failed { group, members: Vec::new(), cause: crate::error::Error::Aborted(String::new()) }
}

#[test]
fn every_rank_has_few_neighbours_of_which_it_is_one_and_in_small_worlds_all() {
    for size in [2, 16, 17, 64, 100, 1000, 1024] {
        let all: Vec<BTreeSet<usize>> = (0..size).map(|rank| Overlay::new(rank, size, FULL).neighbours()).collect();
        let most = if size <= FULL { size - 1 } else { 2 * usize::BITS as usize - 2 * size.leading_zeros() as usize };
        for (rank, neighbours) in all.iter().enumerate() {
            assert!(neighbours.len() <= most && !neighbours.contains(&rank), "{size}: {}", neighbours.len());
            assert!(neighbours.iter().all(|other| all[*other].contains(&rank)));
        }
    }
}

#[test]
fn where_half_of_the_ranks_are_gone_none_of_the_others_has_more_neighbours_than_before() {
    for size in [64, 100, 1024] {
        let mut all: Vec<Overlay> = (0..size / 2).map(|rank| Overlay::new(rank, size, FULL)).collect();
        let before = all.iter().map(|overlay| overlay.neighbours().len()).max();
        let mut wanted_by = vec![0; size / 2];
        for overlay in &mut all {
            (size / 2..size).for_each(|rank| overlay.lost(rank, false, "no heartbeat", &mut Vec::new()));
            overlay.neighbours().into_iter().for_each(|rank| wanted_by[rank] += 1);
        }
        assert!(wanted_by.iter().max() <= before.as_ref(), "{size}: {wanted_by:?}");
        // The ring is closed over the gap.
        assert!(all[0].neighbours().contains(&(size / 2 - 1)) && all[size / 2 - 1].neighbours().contains(&0));
    }
}

#[test]
fn a_notice_reaches_every_rank_once_and_crosses_each_connection_at_most_once_in_each_direction() {
    let mut all = Lines::new(50, 4);
    all.event(7, |overlay, out| overlay.publish(failed(1), out));
    all.settle();
    assert!(all.got.iter().enumerate().all(|(rank, got)| rank == 7 || got == &[Action::Notice(failed(1))]));
    assert!(all.sent <= all.lines.len(), "{} on {} lines", all.sent, all.lines.len());
}

#[test]
fn a_message_for_many_ranks_reaches_each_of_them_once_and_divides_on_its_route() {
    let mut all = Lines::new(50, 4);
    let to: Vec<usize> = (0..50).filter(|rank| rank % 7 != 3).collect();
    all.event(13, |overlay, out| overlay.send(&to, Body::LeftGroup { group: 5 }, out));
    all.settle();
    let one = Action::Deliver(13, Body::LeftGroup { group: 5 });
    for (rank, got) in all.got.iter().enumerate() {
        assert_eq!(got.iter().filter(|action| **action == one).count(), usize::from(to.contains(&rank)));
    }
    // Not as many as one for each receiver and step of its route.
    assert!(all.sent <= 50, "{}", all.sent);
}

#[test]
fn a_death_is_known_to_all_by_one_report_and_the_ranks_beside_it_connect() {
    let mut all = Lines::new(40, 4);
    all.kill(9);
    all.settle();
    for rank in (0..40).filter(|rank| *rank != 9) {
        assert_eq!(all.ranks[rank].presence(9), Presence::Ended);
        let lost = |action: &&Action| matches!(action, Action::Notice(Notice::Lost { rank: 9, ended: true, .. }));
        assert_eq!(all.got[rank].iter().filter(lost).count(), 1);
    }
    let missing = all.ranks[8].not_connected();
    assert!(missing.contains(&10) || all.ranks[8].links().contains(&10));
    let mut out = Vec::new();
    let missing = all.ranks[10].not_connected();
    all.ranks[10].connect(missing, &mut out);
    let dialled = |rank: usize| out.contains(&Action::Dial(rank));
    assert!(all.ranks[10].not_connected().into_iter().filter(|rank| *rank < 10).all(dialled));
}

#[test]
fn notices_of_one_rank_arrive_in_order_also_over_connections_that_are_opened_meanwhile_by_invariant_1() {
    for seed in 1..40 {
        let mut all = Lines::new(30, 4);
        all.random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed);
        for group in 0..20 {
            all.event(3, |overlay, out| overlay.publish(failed(group), out));
            (0..group % 7).for_each(|_| _ = all.step());
            if group % 5 == 4 {
                all.kill(10 + group as usize);
                for rank in 0..30 {
                    for other in all.ranks[rank].not_connected() {
                        let present = |a: usize, b: usize| all.ranks[a].presence(b) == Presence::Present;
                        if present(other, rank)
                            && ![14, 19, 24, 29].contains(&rank)
                            && ![14, 19, 24, 29].contains(&other)
                        {
                            all.connect(rank, other);
                        }
                    }
                }
            }
        }
        all.settle();
        for (rank, got) in all.got.iter().enumerate().filter(|(rank, _)| ![3, 14, 19, 24, 29].contains(rank)) {
            let groups: Vec<u64> = got
                .iter()
                .filter_map(|action| match action {
                    Action::Notice(Notice::Failed { group, .. }) => Some(*group),
                    _ => None,
                })
                .collect();
            assert_eq!(groups, (0..20).collect::<Vec<_>>(), "rank {rank}, seed {seed}");
        }
    }
}

#[test]
fn a_report_of_silence_counts_from_a_lower_rank_or_a_second_one_by_invariant_2() {
    let silent = |rank, by| Notice::Lost { rank, by, ended: false, reason: String::new() };
    let mut overlay = Overlay::new(5, 40, 4);
    let mut out = Vec::new();
    [4, 6, 9].into_iter().for_each(|peer| assert!(overlay.link_up(peer, &mut out)));
    overlay.received_notice(4, silent(20, 2), &mut out);
    assert_eq!(overlay.presence(20), Presence::Silent);
    overlay.received_notice(4, silent(8, 9), &mut out);
    assert_eq!(overlay.presence(8), Presence::Present);
    overlay.received_notice(4, silent(8, 12), &mut out);
    assert_eq!(overlay.presence(8), Presence::Silent);
    // Its own connection to 6 works, and a process that ended would have closed it. The report is the cause of what follows from it.
    let ended = |rank, by| Notice::Lost { rank, by, ended: true, reason: String::new() };
    overlay.received_notice(4, ended(6, 9), &mut out);
    assert_eq!(overlay.presence(6), Presence::Present);
    assert!(out.contains(&Action::Notice(ended(6, 9))));
    overlay.received_notice(4, ended(9, 1), &mut out);
    assert_eq!(overlay.presence(9), Presence::Ended);
    // Of two ranks that do not reach each other the higher goes.
    overlay.received_notice(4, silent(5, 30), &mut out);
    assert_eq!((overlay.presence(30), overlay.excluded_by()), (Presence::Silent, None));
    overlay.received_notice(4, silent(5, 3), &mut out);
    assert_eq!(overlay.excluded_by(), Some(3));
}

#[test]
fn a_message_avoids_a_rank_that_another_reports_as_lost_while_the_own_connection_to_it_has_not_ended() {
    for ended in [true, false] {
        let mut overlay = Overlay::new(0, 64, 4);
        let mut out = Vec::new();
        [32, 48, 63].into_iter().for_each(|peer| assert!(overlay.link_up(peer, &mut out)));
        overlay.received_notice(63, Notice::Lost { rank: 32, by: 40, ended, reason: String::new() }, &mut out);
        assert_eq!(overlay.presence(32), Presence::Present);
        let mut sent_to = |to: usize| {
            out.clear();
            overlay.send(&[to], Body::Connect, &mut out);
            match &out[..] {
                [Action::Send(relay, _)] => relay.clone(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(sent_to(33), [48]);
        // To it itself; and by it where no other is nearer than this rank.
        assert_eq!(sent_to(32), [32]);
        assert_eq!(sent_to(24), [32]);
    }
}

#[test]
fn departures_that_were_not_passed_on_go_before_the_first_message_about_a_view_by_invariant_3() {
    let ready = || {
        Body::View(ViewMessage::Ready {
            view: 1,
            any: true,
            gone: Vec::new(),
            endpoint: Endpoint { port: 1, unix: true },
        })
    };
    let left = |ranks: &[usize]| Message::Notice(Notice::Left { ranks: ranks.to_vec(), moved: false });
    for is_own in [true, false] {
        let mut overlay = Overlay::new(0, 64, 4);
        let mut out = Vec::new();
        [32, 48, 63].into_iter().for_each(|peer| assert!(overlay.link_up(peer, &mut out)));
        for rank in [7, 21] {
            overlay.received_notice(63, Notice::Left { ranks: vec![rank], moved: false }, &mut out);
        }
        assert!(out.iter().all(|action| matches!(action, Action::Notice(_) | Action::PassLater)), "{out:?}");
        assert!(!overlay.view_is_agreed_on());
        out.clear();
        match is_own {
            true => overlay.send(&[32], ready(), &mut out),
            false => overlay.received_routed(Routed { from: 48, to: vec![32], body: ready() }, &mut out),
        }
        assert_eq!(out[0], Action::Send(vec![32, 48, 63], left(&[7, 21])));
        assert!(matches!(&out[1], Action::Send(to, Message::Routed(_)) if *to == [32]) && out.len() == 2, "{out:?}");
        assert!(overlay.view_is_agreed_on());
        // Later ones are collected again.
        out.clear();
        overlay.received_notice(63, Notice::Left { ranks: vec![9], moved: false }, &mut out);
        assert!(out.contains(&Action::PassLater));
    }
}

#[test]
fn a_rank_that_leaves_passes_on_which_others_have_left() {
    let mut overlay = Overlay::new(0, 64, 4);
    let mut out = Vec::new();
    assert!(overlay.link_up(32, &mut out));
    overlay.received_notice(32, Notice::Left { ranks: vec![7], moved: false }, &mut out);
    out.clear();
    overlay.leave(false, &mut out);
    let both = Message::Notice(Notice::Left { ranks: vec![0, 7], moved: false });
    assert_eq!(out, [Action::Send(vec![32], both)]);
}

#[test]
fn what_makes_no_sense_has_no_effect() {
    let mut overlay = Overlay::new(0, 3, FULL);
    let mut out = Vec::new();
    assert!(overlay.link_up(1, &mut out) && !overlay.link_up(1, &mut out));
    assert!(!overlay.link_up(0, &mut out) && !overlay.link_up(9, &mut out));
    for (rank, by) in [(9, 1), (1, 9), (2, 2)] {
        overlay.received_notice(1, Notice::Lost { rank, by, ended: true, reason: String::new() }, &mut out);
    }
    overlay.received_notice(1, Notice::Left { ranks: vec![7, 0], moved: false }, &mut out);
    let opened =
        ViewMessage::Ready { view: 1, any: true, gone: Vec::new(), endpoint: Endpoint { port: 1, unix: true } };
    overlay.received_notice(1, Notice::View { from: 1, message: opened }, &mut out);
    overlay.received_routed(Routed { from: 1, to: vec![3, 99], body: Body::Connect }, &mut out);
    assert_eq!((out, overlay.gone().count()), (vec![], 0));
}
