//! The failure state of a group: the first cause of failure, and the ranks that have left.
//!
//! Each group has one `GroupHealth`. The control plane writes to it, and every wait reads it. Its methods do not block
//! for long and it owns no socket, so transports and collectives do not depend on the control plane.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::error::{Error, Progress, Result, Source};
use crate::wait::{blocking_wait, lock, wait_on_for};

/// Text of the cause that a rank records when it leaves the group itself.
pub const LEAVING: &str = "this rank left the group";

/// Reason of `PeerLost` for a peer that left the group in an orderly way.
pub const LEFT: &str = "it left the group";

/// Start of the reason of `PeerLost` for a peer that lives, if only the connection to it broke.
pub const BROKEN_LINE: &str = "the connection between ranks";

/// Function that asks the control plane about a world rank. The control plane calls the second argument once, with true
/// if the rank lives, after it has recorded everything that it knows of the rank.
type Ask = Box<dyn Fn(usize, Box<dyn FnOnce(bool) + Send>) + Send + Sync>;

/// Function that is called once, with the first cause.
type Listener = Box<dyn FnOnce(&Error) + Send>;

/// How this rank learned of the first cause.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// This rank found it: [`GroupHealth::fail`].
    Local,
    /// Another rank reported it, or no other rank needs to hear of it: [`GroupHealth::fail_from_peer`].
    Peer,
}

/// The listeners of a group. Empty once the group has failed.
#[derive(Default)]
struct Listeners {
    next: u64,
    entries: Vec<Entry>,
}

struct Entry {
    id: u64,
    /// True if the listener is not called for a cause from a peer.
    only_local: bool,
    listener: Listener,
}

/// A guard that keeps a listener subscribed until it is dropped. If another thread has begun to call the listener, the
/// call may still be running when the drop returns.
#[must_use = "dropping a subscription unsubscribes its listener"]
pub struct Subscription {
    /// Dangling if the listener was called at subscription.
    listeners: Weak<Mutex<Listeners>>,
    id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let Some(listeners) = self.listeners.upgrade() else { return };
        let mut listeners = lock(&listeners);
        let at = listeners.entries.iter().position(|entry| entry.id == self.id);
        let removed = at.map(|at| listeners.entries.remove(at));
        // Drop the listener's captures without the lock, because they may include another subscription.
        drop(listeners);
        drop(removed);
    }
}

/// The failure state of one group. Its methods take group ranks; errors name world ranks.
///
/// # Examples
/// ```
/// use bagua_net::health::GroupHealth;
///
/// let health = GroupHealth::local(0, 2);
/// let _subscription = health.subscribe(|cause| eprintln!("the group has failed: {cause}"));
/// assert!(health.check().is_ok());
/// health.fail(health.peer_lost(1, "no heartbeat for 5.0 s"));
/// assert!(health.check().is_err());
/// ```
pub struct GroupHealth {
    /// The first failure. Set once, because later failures are consequences.
    cause: OnceLock<(Error, Origin)>,
    /// True once `cause` is set. Waits check this flag, because reading it is faster than reading `cause`.
    failed: AtomicBool,
    /// Notified when `cause` or an element of `departed` is set.
    changed: (Mutex<()>, Condvar),
    /// True for each group rank that has left. This fails only those operations that need the rank.
    departed: Vec<AtomicBool>,
    world_ranks: Vec<usize>,
    hosts: Vec<String>,
    rank: usize,
    /// Functions to call with the first cause. Never locked while a listener runs.
    listeners: Arc<Mutex<Listeners>>,
    /// Asks the control plane why a connection broke, and how long to wait for the answer.
    ask: OnceLock<(Ask, Duration)>,
    shared: Weak<GroupHealth>,
}

impl GroupHealth {
    /// Creates the failure state of a group whose members have these world ranks and host names.
    pub fn new(rank: usize, world_ranks: Vec<usize>, hosts: Vec<String>) -> Arc<GroupHealth> {
        assert_eq!(world_ranks.len(), hosts.len());
        let departed = world_ranks.iter().map(|_| AtomicBool::new(false)).collect();
        Arc::new_cyclic(|shared| GroupHealth {
            shared: Weak::clone(shared),
            cause: OnceLock::new(),
            failed: AtomicBool::new(false),
            changed: (Mutex::new(()), Condvar::new()),
            departed,
            world_ranks,
            hosts,
            rank,
            listeners: Arc::default(),
            ask: OnceLock::new(),
        })
    }

    /// Creates the failure state of `size` ranks that are threads of one process without a control plane, for tests.
    pub fn local(rank: usize, size: usize) -> Arc<GroupHealth> {
        GroupHealth::new(rank, (0..size).collect(), vec!["localhost".to_owned(); size])
    }

    /// Returns an owning reference, for a thread that outlives the borrow.
    pub fn shared(&self) -> Arc<GroupHealth> {
        self.shared.upgrade().expect("a borrowed value has an owner")
    }

    /// Returns this process's rank in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.world_ranks.len()
    }

    /// Returns the world rank of a group rank.
    pub fn world_rank(&self, rank: usize) -> usize {
        self.world_ranks[rank]
    }

    /// Returns the world ranks of all members, indexed by group rank.
    pub fn world_ranks(&self) -> &[usize] {
        &self.world_ranks
    }

    /// Returns the host name of a group rank.
    pub fn host(&self, rank: usize) -> &str {
        &self.hosts[rank]
    }

    /// Subscribes a listener, which is called once with the first cause of the group's failure, wherever it was found.
    ///
    /// The thread that records the cause calls the listeners in the order of their subscriptions. If the group has
    /// failed already, this function calls the listener itself. A listener may call any method of this health.
    /// Listeners run on the failure path, often on the control thread: they must not block, nor wait for a lock that is
    /// held across a wait. If a listener panics, the panic reaches the recording thread after the other listeners were
    /// called.
    pub fn subscribe(&self, listener: impl FnOnce(&Error) + Send + 'static) -> Subscription {
        self.add(false, Box::new(listener))
    }

    /// Subscribes a listener like [`GroupHealth::subscribe`], but only to a first cause that [`GroupHealth::fail`]
    /// records, which this rank has to report to its peers. The control plane uses this.
    pub fn subscribe_local(&self, listener: impl FnOnce(&Error) + Send + 'static) -> Subscription {
        self.add(true, Box::new(listener))
    }

    fn add(&self, only_local: bool, listener: Listener) -> Subscription {
        let mut listeners = lock(&self.listeners);
        // `record` sets the cause before it takes the listeners. So `record` finds this listener, or we call it here,
        // but never both.
        let Some((cause, origin)) = self.cause.get() else {
            let id = listeners.next;
            listeners.next += 1;
            listeners.entries.push(Entry { id, only_local, listener });
            return Subscription { listeners: Arc::downgrade(&self.listeners), id };
        };
        drop(listeners);
        if *origin == Origin::Local || !only_local {
            listener(cause);
        }
        Subscription { listeners: Weak::new(), id: 0 }
    }

    /// Returns the first cause as an error, or `Ok` while the group has not failed.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { Err(self.cause().expect("failed is set after cause")) } else { Ok(()) }
    }

    /// Returns the first cause, or `None` while the group has not failed.
    pub fn cause(&self) -> Option<Error> {
        self.cause.get().map(|(cause, _)| cause.clone())
    }

    /// Records a failure that this rank found, and calls the listeners if it is the first. Returns the first cause,
    /// which is the error to raise here.
    #[must_use = "the first cause is the error to raise"]
    pub fn fail(&self, error: Error) -> Error {
        self.record(error.clone(), Origin::Local);
        self.cause().unwrap_or(error)
    }

    /// Records a failure that the peers know already or need not know: another rank reported it, it follows from a
    /// failure of the parent group, or this rank is leaving. Does not call listeners of
    /// [`GroupHealth::subscribe_local`].
    pub fn fail_from_peer(&self, error: Error) {
        self.record(error, Origin::Peer);
    }

    fn record(&self, error: Error, origin: Origin) {
        let first = self.cause.set((error, origin)).is_ok();
        self.failed.store(true, Ordering::Release);
        drop(lock(&self.changed.0));
        self.changed.1.notify_all();
        if !first {
            return;
        }
        let entries = std::mem::take(&mut lock(&self.listeners).entries);
        let Some((cause, _)) = self.cause.get() else { return };
        let mut panic = None;
        for Entry { only_local, listener, .. } in entries {
            if (origin == Origin::Local || !only_local)
                && let Err(payload) = catch_unwind(AssertUnwindSafe(|| listener(cause)))
            {
                panic.get_or_insert(payload);
            }
        }
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Records that a peer has left the group. From now on, operations that need the peer fail, and others do not.
    pub fn depart(&self, rank: usize) {
        self.departed[rank].store(true, Ordering::Release);
        drop(lock(&self.changed.0));
        self.changed.1.notify_all();
    }

    /// True if the peer has left the group. A wait must check its own condition once more before it calls this, because
    /// the peer may have done its part and then left.
    #[inline]
    pub fn has_departed(&self, rank: usize) -> bool {
        self.departed[rank].load(Ordering::Acquire)
    }

    /// Returns the error for a lost peer of this group.
    pub fn peer_lost(&self, rank: usize, reason: impl Into<String>) -> Error {
        Error::PeerLost {
            rank: self.world_ranks[rank],
            host: self.hosts[rank].clone(),
            reason: reason.into(),
            noticed_by: self.world_ranks[self.rank],
            progress: None,
            source: Source::default(),
        }
    }

    /// Returns the error for a deadline that passed while these group ranks were missing.
    pub fn timed_out(&self, after: Duration, missing: &[usize], progress: Progress) -> Error {
        Error::Timeout {
            after,
            missing: missing.iter().map(|rank| self.world_ranks[*rank]).collect(),
            noticed_by: self.world_ranks[self.rank],
            progress: Some(Box::new(progress)),
        }
    }

    /// Sets the function by which a broken stream asks the control plane for its cause. The function gets a world rank
    /// and calls its second argument once, with true if that rank lives, after everything that is known of the rank was
    /// recorded here. An operation waits at most `limit` for that. Has no effect after the first call.
    pub fn ask_about_peers(
        &self,
        limit: Duration,
        ask: impl Fn(usize, Box<dyn FnOnce(bool) + Send>) + Send + Sync + 'static,
    ) {
        let _ = self.ask.set((Box::new(ask), limit));
    }

    /// Returns the error to raise after the stream to `rank` ended or broke. Asks the control plane for the cause,
    /// which takes precedence because the broken stream may be its consequence. Otherwise, the peer is lost for the
    /// reason `how`.
    pub fn attribute_disconnect(&self, rank: usize, how: &str) -> Error {
        self.attribute_broken_stream(rank, how, &Source::default())
    }

    /// Does the same as [`GroupHealth::attribute_disconnect`], with the system's error on the stream.
    pub fn attribute_broken_stream(&self, rank: usize, how: &str, source: &Source) -> Error {
        let lives = self.ask_why(rank);
        let (own, peer) = (self.world_ranks[self.rank], self.world_ranks[rank]);
        let reason = match lives {
            _ if self.has_departed(rank) => LEFT.to_owned(),
            true => format!("{BROKEN_LINE} {own} and {peer} broke, and both live ({how})"),
            false => how.to_owned(),
        };
        self.cause().unwrap_or_else(|| self.peer_lost(rank, reason).caused_by(source))
    }

    /// Waits until the cause of a broken stream is recorded, or the control plane knows none. Returns true if the peer
    /// lives.
    fn ask_why(&self, rank: usize) -> bool {
        let is_known = || self.cause.get().is_some() || self.has_departed(rank);
        let Some((ask, limit)) = self.ask.get().filter(|_| !is_known()) else { return false };
        let answer = Arc::new(OnceLock::new());
        let (until, shared, given) = (Instant::now() + *limit, self.shared(), Arc::clone(&answer));
        ask(
            self.world_ranks[rank],
            Box::new(move |lives| {
                let _ = given.set(lives);
                drop(lock(&shared.changed.0));
                shared.changed.1.notify_all();
            }),
        );
        blocking_wait(|| {
            let mut guard = lock(&self.changed.0);
            while !is_known() && answer.get().is_none() {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                guard = wait_on_for(&self.changed.1, guard, left);
            }
        });
        answer.get().copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    fn raised(message: &str) -> Error {
        Error::Aborted(message.to_owned())
    }

    /// Names of the listeners that were called and their arguments, in order.
    #[derive(Clone, Default)]
    struct Calls(Arc<Mutex<Vec<(&'static str, Error)>>>);

    impl Calls {
        fn listener(&self, name: &'static str) -> impl FnOnce(&Error) + Send + 'static {
            let calls = self.clone();
            move |cause| lock(&calls.0).push((name, cause.clone()))
        }

        fn take(&self) -> Vec<(&'static str, Error)> {
            std::mem::take(&mut lock(&self.0))
        }
    }

    #[test]
    fn every_listener_gets_the_first_cause_once_in_the_order_of_subscription() {
        let (health, calls) = (GroupHealth::local(0, 2), Calls::default());
        let _subscriptions = [
            health.subscribe(calls.listener("a")),
            health.subscribe_local(calls.listener("b")),
            health.subscribe(calls.listener("c")),
        ];
        assert_eq!(health.fail(raised("first")), raised("first"));
        assert_eq!(calls.take(), ["a", "b", "c"].map(|name| (name, raised("first"))));
        assert_eq!(health.fail(raised("second")), raised("first"));
        health.fail_from_peer(raised("third"));
        assert_eq!(calls.take(), []);
    }

    #[test]
    fn a_cause_that_a_peer_reported_reaches_all_but_local_listeners() {
        let (health, calls) = (GroupHealth::local(0, 2), Calls::default());
        let _subscriptions = [health.subscribe_local(calls.listener("local")), health.subscribe(calls.listener("any"))];
        health.fail_from_peer(raised("reported"));
        assert_eq!(calls.take(), [("any", raised("reported"))]);
        let _late = health.subscribe_local(calls.listener("late"));
        assert_eq!(health.fail(raised("own")), raised("reported"));
        assert_eq!(calls.take(), []);
    }

    #[test]
    fn a_listener_that_subscribes_after_the_failure_is_called_at_once() {
        let (health, calls) = (GroupHealth::local(0, 2), Calls::default());
        let _ = health.fail(raised("first"));
        drop(health.subscribe(calls.listener("any")));
        drop(health.subscribe_local(calls.listener("local")));
        assert_eq!(calls.take(), [("any", raised("first")), ("local", raised("first"))]);
    }

    #[test]
    fn a_dropped_subscription_is_not_called_and_the_others_are() {
        let (health, calls) = (GroupHealth::local(0, 2), Calls::default());
        let _before = health.subscribe(calls.listener("before"));
        let dropped = health.subscribe(calls.listener("dropped"));
        let after = health.subscribe(calls.listener("after"));
        drop(dropped);
        let _ = health.fail(raised("first"));
        assert_eq!(calls.take(), [("before", raised("first")), ("after", raised("first"))]);
        // Dropping a subscription after its `GroupHealth` is allowed.
        drop(health);
        drop(after);
    }

    #[test]
    fn a_listener_may_call_the_health_and_drop_subscriptions() {
        let (health, calls) = (GroupHealth::local(0, 2), Calls::default());
        let own = Arc::new(Mutex::new(None));
        let (held, inside, nested) = (Arc::clone(&own), Arc::clone(&health), calls.clone());
        *lock(&own) = Some(health.subscribe(move |cause| {
            assert_eq!(inside.check(), Err(cause.clone()));
            assert_eq!(inside.fail(raised("consequence")), *cause);
            assert_eq!(inside.attribute_disconnect(1, "end of stream"), *cause);
            drop(inside.subscribe(nested.listener("nested")));
            drop(lock(&held).take());
        }));
        let captured = health.subscribe(calls.listener("captured"));
        // Unsubscribing drops the captures of the listener: here, another subscription to the same health.
        drop(health.subscribe(move |_| drop(captured)));
        assert_eq!(health.fail(raised("first")), raised("first"));
        assert_eq!(calls.take(), [("nested", raised("first"))]);
        assert!(lock(&own).is_none());
    }

    #[test]
    fn a_broken_stream_is_the_source_only_of_the_loss_that_it_is_the_first_sign_of() {
        let reset = Source::from(std::io::Error::from_raw_os_error(libc::ECONNRESET));
        let health = GroupHealth::local(0, 3);
        let lost = health.attribute_broken_stream(1, "connection reset", &reset);
        assert!(matches!(&lost, Error::PeerLost { rank: 1, reason, .. } if reason == "connection reset"), "{lost:?}");
        assert!(lost.os_error().is_some());
        let _ = health.fail(health.peer_lost(2, "no heartbeat for 5.0 s"));
        let cause = health.attribute_broken_stream(1, "connection reset", &reset);
        assert!(matches!(cause, Error::PeerLost { rank: 2, .. }) && cause.os_error().is_none(), "{cause:?}");
    }

    #[test]
    fn the_panic_of_a_listener_reaches_the_failing_thread_after_the_others_were_called() {
        let (health, calls) = (GroupHealth::local(0, 2), Calls::default());
        let _subscriptions = [health.subscribe(|_| panic!("expected")), health.subscribe(calls.listener("other"))];
        let inside = Arc::clone(&health);
        assert!(std::thread::spawn(move || inside.fail(raised("first"))).join().is_err());
        assert_eq!(calls.take(), [("other", raised("first"))]);
        assert_eq!(health.check(), Err(raised("first")));
    }

    #[test]
    fn listeners_that_subscribe_while_two_threads_fail_the_group_are_called_once_with_one_cause() {
        for _ in 0..200 {
            let (health, calls, start) = (GroupHealth::local(0, 2), Calls::default(), Barrier::new(4));
            let subscriptions: Vec<Subscription> = std::thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    let _ = health.fail(raised("found here"));
                });
                scope.spawn(|| {
                    start.wait();
                    health.fail_from_peer(raised("reported"));
                });
                let subscribe = || {
                    start.wait();
                    (0..20).map(|_| health.subscribe(calls.listener("any"))).collect::<Vec<_>>()
                };
                let threads = [scope.spawn(subscribe), scope.spawn(subscribe)];
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            let (all, cause) = (calls.take(), health.cause().unwrap());
            assert_eq!(all.len(), subscriptions.len());
            assert!(all.iter().all(|(_, seen)| *seen == cause));
        }
    }
}
