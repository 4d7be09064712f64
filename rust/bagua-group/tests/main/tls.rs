//! TLS between ranks: which connections are accepted, and the errors of ranks that disagree.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::group_world::{PATIENCE, config, connect_all, own_host, port, try_world, until, world_with};
use bagua_group::{
    Access, Bootstrap, Config, RendezvousServer, Store, StoreServer, TcpStore, Tls, TransportChoice, rendezvous_at,
};
use bagua_kernels::error::{Error, Result};

/// How long ranks wait for one that cannot come.
const LIMIT: Duration = Duration::from_secs(2);

const TLS: Option<&Tls> = Some(&Tls::Secret);

/// Access by a secret, with TLS or without.
type Member = (&'static [u8], Option<&'static Tls>);

fn access((secret, tls): Member) -> Access<'static> {
    Access { secret, tls }
}

fn encrypted(config: &mut Config) {
    config.tls = Some(Tls::Secret);
    config.transport = TransportChoice::Tcp;
}

/// The rendezvous of two ranks within this time; what each of them gets.
fn meet(first: Member, second: Member, limit: Duration) -> [Result<Vec<Vec<u8>>>; 2] {
    let server = RendezvousServer::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let at = server.address().unwrap();
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || server.serve(2, b"0", access(first), limit));
        let one = scope.spawn(move || rendezvous_at(at, 1, 2, b"1", access(second), limit));
        [zero.join().unwrap(), one.join().unwrap()]
    })
}

/// Asserts that both ranks get an error with this word.
#[track_caller]
fn both_say<T: std::fmt::Debug>(word: &str, outcomes: impl IntoIterator<Item = Result<T>>) {
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let text = outcome.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(word), "rank {rank}: {text}");
    }
}

#[test]
fn ranks_with_one_secret_meet_over_tls() {
    assert_eq!(
        meet((b"s", TLS), (b"s", TLS), PATIENCE),
        [Ok(vec![b"0".to_vec(), b"1".to_vec()]), Ok(vec![b"0".to_vec(), b"1".to_vec()])]
    );
}

#[test]
fn another_secret_is_an_error_at_both_ends_of_a_rendezvous() {
    both_say("secret", meet((b"s", TLS), (b"S", TLS), LIMIT));
}

#[test]
fn tls_on_one_rank_only_is_an_error_at_both_ends_of_a_rendezvous() {
    both_say("TLS", meet((b"s", TLS), (b"s", None), LIMIT));
    both_say("TLS", meet((b"s", None), (b"s", TLS), LIMIT));
}

#[test]
fn tls_on_one_rank_only_is_an_error_on_both_ranks_of_a_group() {
    let limited = |config: &mut Config| {
        config.connect_timeout = LIMIT;
        config.tls = (config.rank == 1).then_some(Tls::Secret);
    };
    both_say("TLS", try_world(2, limited).into_iter().map(|group| group.map(drop)));
}

#[test]
fn another_secret_is_an_error_on_both_ranks_of_a_group() {
    let limited = |config: &mut Config| {
        encrypted(config);
        config.connect_timeout = LIMIT;
        config.secret = vec![b's', config.rank as u8];
    };
    both_say("secret", try_world(2, limited).into_iter().map(|group| group.map(drop)));
}

#[test]
fn a_rank_that_gave_up_because_of_another_secret_is_lost_for_that_reason() {
    let limited = |config: &mut Config| {
        encrypted(config);
        // Rank 0 finds that the other does not listen any more.
        config.connect_timeout = if config.rank == 0 { PATIENCE } else { LIMIT };
        config.secret = vec![b's', config.rank as u8];
    };
    let outcomes = try_world(2, limited);
    let Some(Err(error @ Error::PeerLost { rank: 1, .. })) = outcomes.first() else { panic!("rank 1 is not lost") };
    assert!(error.to_string().contains("secret"), "{error}");
}

#[test]
fn tls_without_a_secret_is_an_invalid_argument_before_anything_listens() {
    let config = Config { tls: Some(Tls::Secret), ..Config::new(0, 2) };
    assert!(matches!(Bootstrap::bind(config).map(drop), Err(Error::InvalidArgument(text)) if text.contains("secret")));
    let server = StoreServer::start("127.0.0.1", 0, &access((b"", TLS)), None).map(drop);
    assert!(matches!(server, Err(Error::InvalidArgument(_))));
}

#[test]
fn the_lanes_of_an_encrypted_group_are_by_tls() {
    let groups = world_with(2, encrypted);
    std::thread::scope(|scope| {
        let lanes: Vec<_> = groups.iter().map(|group| scope.spawn(|| group.lane().unwrap())).collect();
        for lane in lanes {
            assert!(lane.join().unwrap().transports().contains(&"tls"));
        }
    });
    assert_eq!(groups[0].stats().connections_refused.load(Ordering::Relaxed), 0);
}

#[test]
fn garbage_at_an_encrypted_port_is_refused_and_counted() {
    let bootstraps: Vec<_> = (0..2)
        .map(|rank| {
            let mut config = config(rank, 2);
            encrypted(&mut config);
            Bootstrap::bind(config).unwrap()
        })
        .collect();
    let addresses: Vec<_> = bootstraps.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
    let port = port(&addresses[0]);
    let groups: Vec<_> = connect_all(bootstraps, &addresses).into_iter().map(|group| group.unwrap()).collect();
    let refused = || groups[0].stats().connections_refused.load(Ordering::Relaxed);
    // No TLS; a record that is no handshake; the beginning of one, cut off; a length beyond the limit.
    let openings: [&[u8]; 4] =
        [b"GET / HTTP/1.1\r\n\r\n", &[23, 3, 3, 0, 1, 0], &[22, 3, 1, 0, 200, 1, 0], &[22, 3, 3, 255, 255, 1]];
    for (count, opening) in openings.into_iter().enumerate() {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(opening).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        // A reset ends the answer, too.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.first().is_none_or(|first| (20..24).contains(first)), "{answer:?}");
        until("the refusal is counted", || refused() == count as u64 + 1);
    }
    groups.iter().for_each(|group| group.health().check().unwrap());
}

#[test]
fn a_store_keeps_values_for_who_has_the_secret() {
    for tls in [None, TLS] {
        let server = StoreServer::start("127.0.0.1", 0, &access((b"s", tls)), None).unwrap();
        let connect =
            |member: Member, limit| TcpStore::connect("127.0.0.1", server.address().port(), &access(member), limit);
        // Also the time after which a store whose server has ended is given up.
        let [one, other] = [(); 2].map(|()| connect((b"s", tls), 2 * LIMIT).unwrap());
        assert_eq!(one.get("name"), Ok(None));
        assert_eq!(one.set_new("name", b"first"), Ok(b"first".to_vec()));
        assert_eq!(other.set_new("name", b"second"), Ok(b"first".to_vec()));
        other.set("name", b"third").unwrap();
        assert_eq!(one.get("name"), Ok(Some(b"third".to_vec())));
        let refusal = |member| connect(member, LIMIT).map(drop).unwrap_err().to_string();
        let text = refusal((b"S", tls));
        assert!(text.contains("secret"), "{text}");
        let text = refusal((b"s", if tls.is_some() { None } else { TLS }));
        assert!(text.contains("TLS"), "{text}");
        drop(server);
        assert!(one.get("name").is_err());
    }
}

#[test]
fn no_server_at_the_address_of_a_store_is_a_timeout() {
    let host = own_host();
    let port = std::net::TcpListener::bind((host.as_str(), 0)).unwrap().local_addr().unwrap().port();
    let outcome = TcpStore::connect(&host, port, &access((b"s", TLS)), Duration::from_millis(200));
    assert!(matches!(outcome.map(drop), Err(Error::Timeout { .. })));
}
