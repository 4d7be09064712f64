//! Admission limits the accepted connections that have not yet proved that they belong to the job.
//!
//! Any process that reaches a port can open connections and send nothing. If a listener refused new connections while
//! its table is full, such a process could keep the job's own ranks out. Therefore a new connection replaces an old
//! one: the oldest connection of the source address with the most entries. A member of the job proves itself within a
//! few round trips. If it lost its place, it connects again.
//!
//! Invariants, quoted by the tests:
//!
//! 1. The table has two halves with a limit each: connections whose hello is awaited, and the others. Neither half can
//!    crowd out the other.
//! 2. An accepted connection has [`FIRST_BYTES`] for its hello, no matter how many connections wait behind it. A hello
//!    that has arrived by then counts, even if the thread that reads it had no processor.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::handshake::{self, ReceivedHello, Refusal};
use crate::wait::lock;

/// Time limit for the hello while the table is full. Otherwise the limit is [`STEP_TIMEOUT`](handshake::STEP_TIMEOUT).
const FIRST_BYTES: Duration = Duration::from_millis(50);

/// IP address from which a connection comes; `None` for a Unix socket.
type Source = Option<std::net::IpAddr>;

/// The connections of one listener that have not proved that they belong to the job.
#[derive(Debug)]
pub(super) struct Admission {
    table: Mutex<Table>,
    /// Notified when a place becomes free.
    freed: Notify,
}

impl Admission {
    /// Creates a table with this number of places.
    pub(super) fn new(places: usize) -> Arc<Admission> {
        let table = Table { half: (places / 2).max(1), next: 0, entries: BTreeMap::new() };
        Arc::new(Admission { table: Mutex::new(table), freed: Notify::new() })
    }

    /// Returns the number of connections in the table.
    pub(super) fn count(&self) -> usize {
        lock(&self.table).entries.len()
    }

    /// Waits until one more connection may be accepted, for about [`FIRST_BYTES`]. Ends the oldest connection if the
    /// table is full.
    pub(super) async fn place(&self) {
        loop {
            let freed = self.freed.notified();
            let vacancy = lock(&self.table).place(Instant::now());
            match vacancy {
                Vacancy::Free => return,
                Vacancy::FreeAt(until) => _ = tokio::time::timeout_at(until, freed).await,
                Vacancy::Ending => freed.await,
            }
        }
    }

    /// Adds an accepted connection. `from` is its TCP address.
    pub(super) fn enter(self: &Arc<Admission>, from: Option<SocketAddr>) -> Candidate {
        let ended = Arc::new(Notify::new());
        let source = from.map(|from| from.ip().to_canonical());
        let id = lock(&self.table).enter(source, Instant::now(), Arc::clone(&ended));
        Candidate { admission: Arc::clone(self), id, ended }
    }
}

/// An accepted connection that has not yet proved that it belongs to the job. Dropping it frees its place in the table.
#[derive(Debug)]
pub(super) struct Candidate {
    admission: Arc<Admission>,
    id: u64,
    /// Notified when another connection takes the place of this one.
    ended: Arc<Notify>,
}

impl Candidate {
    /// Runs the steps by which the client proves itself. Returns `None` if another connection takes the place first.
    pub(super) async fn prove<T>(&self, steps: impl Future<Output = T>) -> Option<T> {
        let mut steps = pin!(steps);
        loop {
            tokio::select! {
                biased;
                outcome = &mut steps => return Some(outcome),
                () = self.ended.notified() => {}
            }
            // The yield lets the runtime read all sockets. Then the steps see bytes that arrived while this thread had
            // no processor.
            tokio::task::yield_now().await;
            tokio::select! {
                biased;
                outcome = &mut steps => return Some(outcome),
                () = std::future::ready(()) => {}
            }
            if !lock(&self.admission.table).keeps(self.id) {
                return None;
            }
        }
    }

    /// First step: reads the hello.
    pub(super) async fn read_hello(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Result<ReceivedHello, Refusal> {
        let received = handshake::read_hello(stream).await;
        lock(&self.admission.table).has_sent_hello(self.id);
        self.admission.freed.notify_one();
        received
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        lock(&self.admission.table).entries.remove(&self.id);
        self.admission.freed.notify_one();
    }
}

/// Says if and when one more connection may be accepted.
#[derive(Debug, PartialEq, Eq)]
enum Vacancy {
    Free,
    /// At this time at the latest.
    FreeAt(Instant),
    /// When the oldest connection has been closed, unless its hello arrives first.
    Ending,
}

#[derive(Debug)]
struct Table {
    /// Number of places in each half (invariant 1).
    half: usize,
    /// Id of the next entry.
    next: u64,
    /// Entries by id, which is also the order of their age.
    entries: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    source: Source,
    since: Instant,
    /// True if the hello has arrived. The entry is then in the second half.
    sent_hello: bool,
    /// True if the time for the hello is over.
    is_due: bool,
    /// See [`Candidate::ended`].
    ended: Arc<Notify>,
}

impl Table {
    fn enter(&mut self, source: Source, since: Instant, ended: Arc<Notify>) -> u64 {
        let id = self.next;
        self.next += 1;
        self.entries.insert(id, Entry { source, since, sent_hello: false, is_due: false, ended });
        id
    }

    /// Moves an entry to the second half. If that is full, its oldest entry is removed.
    fn has_sent_hello(&mut self, id: u64) {
        if let Some(entry) = self.oldest(true).and_then(|oldest| self.entries.remove(&oldest)) {
            entry.ended.notify_one();
        }
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.sent_hello = true;
            entry.is_due = false;
        }
    }

    /// True if an entry still has its place.
    fn keeps(&self, id: u64) -> bool {
        self.entries.get(&id).is_some_and(|entry| !entry.is_due)
    }

    /// Makes room for one more connection if the time of the oldest one is over.
    fn place(&mut self, now: Instant) -> Vacancy {
        let Some(oldest) = self.oldest(false) else { return Vacancy::Free };
        let entry = self.entries.get_mut(&oldest).expect("the entry that was found");
        let until = entry.since + FIRST_BYTES;
        if until > now {
            return Vacancy::FreeAt(until);
        }
        if !entry.is_due {
            entry.is_due = true;
            entry.ended.notify_one();
        }
        Vacancy::Ending
    }

    /// Returns the entry that must leave a half. `None` if the half is not full. It is the oldest entry of the source
    /// with the most entries in this half.
    fn oldest(&self, sent_hello: bool) -> Option<u64> {
        let half = || self.entries.iter().filter(|(_, entry)| entry.sent_hello == sent_hello);
        let mut counts: HashMap<Source, usize> = HashMap::new();
        half().for_each(|(_, entry)| *counts.entry(entry.source).or_default() += 1);
        if counts.values().sum::<usize>() < self.half {
            return None;
        }
        let most = counts.values().copied().max()?;
        half().find(|(_, entry)| counts[&entry.source] == most).map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a table of six places, three in each half, with one entry for each source. The entries are a millisecond
    /// apart and begin at `start`.
    fn table(sources: &[u8], start: Instant) -> Table {
        let mut table = Table { half: 3, next: 0, entries: BTreeMap::new() };
        for (at, source) in sources.iter().enumerate() {
            let source = Some(std::net::Ipv4Addr::new(10, 0, 0, *source).into());
            table.enter(source, start + Duration::from_millis(at as u64), Arc::default());
        }
        table
    }

    fn kept(table: &Table) -> Vec<u64> {
        table.entries.keys().copied().filter(|id| table.keeps(*id)).collect()
    }

    #[test]
    fn the_oldest_connection_of_the_source_with_the_most_loses_its_place() {
        let (start, later) = (Instant::now(), Instant::now() + 2 * FIRST_BYTES);
        for (sources, vacancy, expected) in [
            (&[1, 2][..], Vacancy::Free, vec![0, 1]),
            (&[1, 1, 1], Vacancy::Ending, vec![1, 2]),
            (&[1, 2, 2], Vacancy::Ending, vec![0, 2]),
            (&[1, 2, 3], Vacancy::Ending, vec![1, 2]),
            (&[1, 2, 2, 1, 2], Vacancy::Ending, vec![0, 2, 3, 4]),
        ] {
            let mut table = table(sources, start);
            for _ in 0..2 {
                assert_eq!(table.place(later), vacancy, "until that one has left");
            }
            assert_eq!(kept(&table), expected, "{sources:?}");
        }
    }

    #[test]
    fn each_connection_has_its_time_for_the_hello_by_invariant_2() {
        let start = Instant::now();
        let mut table = table(&[1, 2, 2], start);
        let until = start + Duration::from_millis(1) + FIRST_BYTES;
        assert_eq!(table.place(start + FIRST_BYTES), Vacancy::FreeAt(until));
        assert_eq!(kept(&table), [0, 1, 2]);
        assert_eq!(table.place(until), Vacancy::Ending);
        assert_eq!(kept(&table), [0, 2]);
        table.has_sent_hello(1);
        assert_eq!(kept(&table), [0, 1, 2], "the hello has come after all");
        assert_eq!(table.place(until), Vacancy::Free);
    }

    /// Returns the outcome of a connection that waits for its hello in the only place, on a thread that had no
    /// processor until the time was over.
    fn late(sent: &[u8]) -> Option<Result<ReceivedHello, Refusal>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut client, server) = tokio::net::UnixStream::pair().unwrap();
            let admission = Admission::new(2);
            let candidate = admission.enter(None);
            let proved = tokio::spawn(async move {
                let mut server = server;
                candidate.prove(candidate.read_hello(&mut server)).await
            });
            tokio::io::AsyncWriteExt::write_all(&mut client, sent).await.unwrap();
            std::thread::sleep(2 * FIRST_BYTES);
            admission.place().await;
            let outcome = proved.await.unwrap();
            drop(client);
            outcome
        })
    }

    #[test]
    fn a_hello_that_came_while_its_reader_had_no_processor_counts_by_invariant_2() {
        assert!(late(b"").is_none(), "nothing came: another connection gets the place");
        assert!(matches!(late(&[b'?'; 256]), Some(Err(_))), "what came was read, and is no hello");
    }

    #[test]
    fn no_half_crowds_out_the_other_by_invariant_1() {
        let start = Instant::now();
        let mut table = table(&[1, 1, 1, 1, 2], start);
        for id in 0..4 {
            table.has_sent_hello(id);
        }
        assert_eq!(kept(&table), [1, 2, 3, 4], "the oldest that has sent its hello makes room for another one");
        assert_eq!(table.place(start), Vacancy::Free, "one connection whose hello is awaited");
        assert_eq!(kept(&table), [1, 2, 3, 4]);
    }
}
