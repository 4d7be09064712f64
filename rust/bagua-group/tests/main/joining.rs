//! A rank that ends or freezes while a group is being joined is named by the others, long before their deadline.

use std::time::{Duration, Instant};

use crate::group_world::{Process, cause, config, connect_all, run_commands, sockets, until};
use bagua_group::{Bootstrap, Config, Group};
use bagua_kernels::error::Error;
use rustix::process::Signal;

const ENTRY: &str = "joining::entry_of_processes";

/// How long a rank may be silent. The deadline is 20 s.
const HEARTBEAT: Duration = Duration::from_secs(6);

/// The rank that ends or freezes.
const VICTIM: usize = 2;

const SIZE: usize = 4;

#[test]
#[ignore = "the other tests start processes that run this"]
fn entry_of_processes() {
    run_commands();
}

/// The moment at which the victim gets the signal.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// All ranks have the victim's address, and the victim has not connected to any rank.
    BeforeConnecting,
    /// The victim waits for the last rank, which has not begun to connect.
    PartlyConnected,
    /// The victim is connected to all ranks, and the other ranks open a lane, which needs the victim.
    OpeningLanes,
}

/// Starts the victim and joins a group with it; the outcomes of the ranks that the moment concerns.
fn join(signal: Signal, moment: Moment) -> Vec<Result<(), Error>> {
    let mut victim = Process::start(ENTRY, VICTIM, SIZE, HEARTBEAT);
    let bind = |rank| Bootstrap::bind(Config { heartbeat_timeout: HEARTBEAT, ..config(rank, SIZE) }).unwrap();
    let mut others: Vec<Bootstrap> = [0, 1, 3].map(bind).into();
    let mut addresses: Vec<Vec<u8>> = others.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
    addresses.insert(VICTIM, victim.address());
    // A lane of one host needs the rank that makes its memory only.
    let lane = |group: Group| group.lane().map(drop).and_then(|()| Err(cause(&group)));
    match moment {
        Moment::BeforeConnecting => {
            victim.signal(signal);
            connect_all(others, &addresses).into_iter().map(|group| group.map(drop)).collect()
        }
        Moment::PartlyConnected => {
            // It listens, and is late.
            let _last = others.pop();
            let own = std::process::id();
            let before = (victim.sockets(), sockets(own));
            std::thread::scope(|scope| {
                let joining = scope.spawn(|| connect_all(others, &addresses));
                until("the lower ranks are connected", || sockets(own) >= before.1 + 2);
                victim.connect(&addresses);
                until("it is connected to them", || victim.sockets() >= before.0 + 2);
                victim.signal(signal);
                joining.join().unwrap().into_iter().map(|group| group.map(drop)).collect()
            })
        }
        Moment::OpeningLanes => {
            victim.connect(&addresses);
            let groups = connect_all(others, &addresses);
            victim.read_after("CONNECTED");
            std::thread::scope(|scope| {
                let opening: Vec<_> =
                    groups.into_iter().map(|group| scope.spawn(move || lane(group.unwrap()))).collect();
                victim.signal(signal);
                opening.into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        }
    }
}

#[test]
fn a_rank_that_ends_or_freezes_at_any_moment_of_joining_is_named_by_all_others() {
    for moment in [Moment::BeforeConnecting, Moment::PartlyConnected, Moment::OpeningLanes] {
        for signal in [Signal::KILL, Signal::STOP] {
            for outcome in join(signal, moment) {
                let named = matches!(&outcome, Err(Error::PeerLost { rank: VICTIM, .. }));
                assert!(named, "{signal:?}, {moment:?}: {outcome:?}");
            }
        }
    }
}

#[test]
fn a_rank_that_connects_when_the_others_have_found_a_loss_names_the_lost_rank_and_none_that_gave_up() {
    let heartbeat_timeout = Duration::from_secs(60);
    let mut victim = Process::start(ENTRY, VICTIM, SIZE, heartbeat_timeout);
    let bind = |rank| Bootstrap::bind(Config { heartbeat_timeout, ..config(rank, SIZE) }).unwrap();
    let mut ranks: Vec<Bootstrap> = [0, 1, 3].map(bind).into();
    let mut addresses: Vec<Vec<u8>> = ranks.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
    addresses.insert(VICTIM, victim.address());
    let late = ranks.split_off(2);
    let before = victim.sockets();
    victim.connect(&addresses);
    let outcomes = std::thread::scope(|scope| {
        let early = scope.spawn(|| connect_all(ranks, &addresses));
        until("the lower ranks are connected to it", || victim.sockets() >= before + 2);
        victim.signal(Signal::KILL);
        // A rank that did not wait for the last one would have given up by then.
        let killed = Instant::now();
        until("they find it", || early.is_finished() || killed.elapsed() > Duration::from_millis(500));
        let late = connect_all(late, &addresses);
        early.join().unwrap().into_iter().chain(late)
    });
    for outcome in outcomes.map(|group| group.map(drop)) {
        assert!(matches!(&outcome, Err(Error::PeerLost { rank: VICTIM, .. })), "{outcome:?}");
    }
}
